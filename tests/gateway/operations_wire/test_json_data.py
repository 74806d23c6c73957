"""forward_backward in JSON: xorl's form and Tinker's, labels and target tokens, and the answer."""

from collections.abc import Sequence

import msgspec
import pytest

from bombus.errors import Refused
from bombus.operations import Array, Category, DType, Failed, ForwardBackward, LossSpec, Scores
from bombus_gateway import limits
from bombus_gateway.operations_wire.data.json_data import read_json_data
from bombus_gateway.operations_wire.data.scores import write_json_scores
from tests.gateway.operations_wire.protobuf_bodies import int32s


def body(data: list[object], loss: str = "cross_entropy", **more: object) -> bytes:
    given = {"data": data, "loss_fn": loss, **more}
    return msgspec.json.encode({"model_id": "default", "seq_id": 2, "forward_backward_input": given})


def datum(tokens: Sequence[float], **inputs: object) -> dict[str, object]:
    return {"model_input": {"input_ids": tokens}, "loss_fn_inputs": inputs}


def tensor(data: list[float], *shape: int, dtype: str = "float32") -> dict[str, object]:
    return {"data": data, "dtype": dtype, "shape": list(shape) or None}


def operation(given: bytes, forward_only: bool = False) -> ForwardBackward:
    submission = read_json_data(given, forward_only)
    assert (submission.model, submission.seq) == ("default", 2)
    assert isinstance(submission.operation, ForwardBackward), submission.operation
    return submission.operation


def failure(given: bytes) -> str:
    submission = read_json_data(given, False)
    assert (submission.model, submission.seq) == ("default", 2)
    assert isinstance(submission.operation, Failed)
    assert submission.operation.category == Category.USER
    return submission.operation.error


def int64s(*values: int) -> Array:
    return Array.of(DType.INT64, values)


def float32s(*values: float) -> Array:
    return Array.of(DType.FLOAT32, values)


TARGETS = datum([5, 6], target_tokens=[6, 7])


def test_target_tokens_stand_beside_the_tokens_that_predict_them() -> None:
    read = operation(body([datum([5, 6], target_tokens=tensor([6, 7], 2), weights=[0.5, -2])], return_per_token=1))
    assert read.loss == LossSpec("cross_entropy")
    assert not read.forward_only
    assert read.data[0].tokens == int32s(5, 6)
    assert read.data[0].inputs == {"target_tokens": int64s(6, 7), "weights": float32s(0.5, -2.0)}


def test_labels_are_shifted_and_those_of_minus_a_hundred_do_not_count() -> None:
    # Token 5 predicts the label of 6, which is ignored; 6 predicts 7, and 7 predicts 8.
    read = operation(body([datum([5, 6, 7, 8], labels=tensor([-100, -100, 7, 8], 4))], "causallm_loss"))
    assert read.loss.name == "cross_entropy"
    assert read.data[0].tokens == int32s(5, 6, 7)
    assert read.data[0].inputs == {"target_tokens": int64s(0, 7, 8), "weights": float32s(0.0, 1.0, 1.0)}


def test_inputs_beside_labels_are_shifted_with_them_unless_they_are_already() -> None:
    inputs = {"labels": [-100, 6, 7], "logprobs": [0.0, -1.0, -2.0], "advantages": [0.5, 0.25]}
    read = operation(body([datum([5, 6, 7], **inputs)], "policy_loss"))
    assert read.data[0].inputs == {
        "target_tokens": int64s(6, 7),
        "logprobs": float32s(-1.0, -2.0),
        "advantages": float32s(0.5, 0.25),
    }


def test_where_labels_are_ignored_a_loss_of_advantages_has_none() -> None:
    inputs = {"labels": [1, -100, 7], "advantages": [0.5, 0.5, 0.25]}
    (one,) = operation(body([datum([5, 6, 7], **inputs)], "drgrpo")).data
    assert one.inputs == {"target_tokens": int64s(0, 7), "advantages": float32s(0.0, 0.25)}


def test_where_labels_are_ignored_a_mask_of_the_caller_is_0_too() -> None:
    inputs = {"labels": [1, -100, 7], "advantages": [0.5, 0.5, 0.25], "mask": [1, 1, 0.5]}
    (one,) = operation(body([datum([5, 6, 7], **inputs)], "drgrpo")).data
    assert one.inputs["mask"] == float32s(0.0, 0.5)
    assert one.inputs["target_tokens"] == int64s(0, 7)


def test_weights_of_the_caller_are_kept_where_labels_count() -> None:
    (one,) = operation(body([datum([5, 6, 7], labels=[1, -100, 7], weights=[9, 8, -0.5])], "per_token_ce")).data
    assert one.inputs["weights"] == float32s(0.0, -0.5)


def test_target_tokens_may_be_ignored_like_labels() -> None:
    (one,) = operation(body([datum([5, 6], target_tokens=[-100, 7])])).data
    assert one.inputs == {"target_tokens": int64s(0, 7), "weights": float32s(0.0, 1.0)}


def test_several_targets_for_each_token_come_as_lists_or_with_a_shape() -> None:
    for targets in ([[1, 2], [3, 4]], tensor([1, 2, 3, 4], 2, 2)):
        (one,) = operation(body([datum([5, 6], target_tokens=targets)])).data
        assert one.inputs["target_tokens"] == Array.of(DType.INT64, [1, 2, 3, 4], (2, 2))


def test_names_of_tinker_are_understood() -> None:
    given = {
        "session_id": "default",
        "seq_id": 2,
        "forward_backward_input": {
            "data": [
                {
                    "model_input": {"chunks": [{"tokens": [5], "type": "encoded_text"}, {"tokens": [6]}]},
                    "loss_fn_inputs": {"target_tokens": [6, 7]},
                }
            ],
            "loss_fn": "ppo",
            "loss_fn_config": {"clip_low_threshold": 0.7},
        },
    }
    read = operation(msgspec.json.encode(given))
    assert read.loss == LossSpec("ppo", {"clip_low_threshold": 0.7})
    assert read.data[0].tokens == int32s(5, 6)


def test_settings_of_a_loss_are_numbers_and_texts() -> None:
    params = {"eps_clip": 0.2, "use_tis": True, "kl_type": "k3", "icepop_beta": None, "compute_kl_stats": False}
    read = operation(body([], "policy_loss", loss_fn_params={**params, "return_per_token": True}))
    assert read.loss == LossSpec("policy_loss", {"eps_clip": 0.2, "use_tis": 1.0, "kl_type": "k3"})


def test_forward_leaves_no_gradient() -> None:
    given = {"model_id": "default", "seq_id": 2, "forward_input": {"data": [TARGETS], "loss_fn": "cross_entropy"}}
    assert operation(msgspec.json.encode(given), forward_only=True).forward_only


IMAGE = {"model_input": {"chunks": [{"type": "image", "data": "x"}]}, "loss_fn_inputs": {}}
MASKED = {"model_input": {"input_ids": [1], "attention_mask": [1]}, "loss_fn_inputs": {}}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (b'{"model_id": "default", "seq_id": 2}', "The body has no forward_backward_input"),
        (body([TARGETS], "opd_loss"), "The loss 'opd_loss' is not offered: this server has no teacher"),
        (body([TARGETS], "hinge"), "There is no loss 'hinge'"),
        (body([TARGETS], loss_fn_params={"beta": [1]}), "forward_backward_input.loss_fn_params[...]: Expected"),
        (body([IMAGE]), "data[0].model_input has a chunk of type 'image', but the models here read only text"),
        (body([MASKED]), "data[0].model_input has 'attention_mask', which is not supported here"),
        (body([TARGETS, datum([], target_tokens=[])]), "data[1] has no token to predict another from; leave it out"),
        (body([datum([5], labels=[5])]), "data[0] has no token to predict another from"),
        (body([datum([5, 6], labels=[5])]), "data[0] has labels of shape [1] for 2 tokens: send one for each"),
        (body([datum([5, 6], labels=[5, 6], target_tokens=[5, 6])]), "has labels and target_tokens; send one"),
        (body([datum([5, 1.5])]), "data[0].model_input has 1.5 at 1, but tokens are 32-bit integers"),
        (body([datum([5, -1])]), "data[0].model_input has the token -1, but tokens cannot be negative"),
        (body([datum([5, 1 << 40])]), "data[0].model_input has 1099511627776.0 at 1, but tokens are 32-bit integers"),
        (body([datum([5], weights=["x"])]), "data[0].loss_fn_inputs['weights'][0]: Expected `float`"),
        (body([datum([5], weights="x")]), "data[0].loss_fn_inputs['weights']: Expected `array`"),
        (body([datum([5], weights=[[1, 2], [3]])]), "data[0].loss_fn_inputs['weights'] has rows of different lengths"),
        (body([datum([5], weights=tensor([1], 2))]), "has 1 numbers, which are not of shape [2]"),
        (
            body([datum([5], weights={"data": [1], "shape": [1, 2], "sparse_crow_indices": [0, 1]})]),
            "data[0].loss_fn_inputs['weights'] is sparse, which JSON bodies do not support",
        ),
        (body([{**TARGETS, "routed_experts": [[[0]]]}]), "routed_experts cannot be replayed"),
        (body([TARGETS], routed_experts=[[[[0]]]]), "routed_experts cannot be replayed"),
        (body([datum([5], **{f"x{each}": [] for each in range(33)})]), "33 arrays, over the limit of 32"),
        (body([TARGETS] * (limits.DATA + 1)), "4097 data in one request are over the limit of 4096"),
        (body([{"loss_fn_inputs": {}}]), "forward_backward_input.data[0]: Object missing required field `model_input`"),
    ],
)
def test_what_cannot_be_done_is_an_operation_that_has_failed(given: bytes, why: str) -> None:
    assert why in failure(given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (b"{", "could not be read as JSON"),
        (b'{"seq_id": "two"}', "seq_id: Expected `int | null`"),
        (b'{"x":' + b"[" * 100_000, "nested too deeply"),
    ],
    ids=["torn", "type", "deep"],
)
def test_what_is_not_json_is_refused_at_once(given: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        read_json_data(given, False)


def test_the_answer_has_arrays_of_each_datum_and_the_sum_of_its_terms() -> None:
    outputs = (
        {"logprobs": float32s(-1.0, -2.0), "elementwise_loss": float32s(0.5, 0.25)},
        {"logprobs": float32s(-3.0), "elementwise_loss": float32s(4.0)},
    )
    scores = Scores(outputs=outputs, loss=4.75, tokens=2, metrics={"ratio:max": 2.0})
    answer = msgspec.to_builtins(write_json_scores(scores, "cross_entropy"))
    assert answer == {
        "loss_fn_output_type": "cross_entropy",
        "loss_fn_outputs": [
            {
                "logprobs": {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2]},
                "elementwise_loss": {"data": [0.5, 0.25], "dtype": "float32", "shape": [2]},
                "loss": {"data": [0.75], "dtype": "float32", "shape": []},
            },
            {
                "logprobs": {"data": [-3.0], "dtype": "float32", "shape": [1]},
                "elementwise_loss": {"data": [4.0], "dtype": "float32", "shape": [1]},
                "loss": {"data": [4.0], "dtype": "float32", "shape": []},
            },
        ],
        "metrics": {"ratio:max": 2.0, "loss:sum": 4.75, "valid_tokens:sum": 2.0, "loss:mean": 2.375},
        "info": {},
    }


def test_what_compute_kl_stats_asks_for_has_xorls_names() -> None:
    sums = {"kl_sampled_k3:sum": 0.5, "entropy_sampled:sum": 3.0}
    scores = Scores(outputs=({"elementwise_loss": float32s(0.5)},), loss=0.5, tokens=2, metrics=sums)
    means = {"loss:mean": 0.25, "kl_sample_train_k3:mean": 0.25, "entropy_sample:mean": 1.5}
    metrics = write_json_scores(scores, "importance_sampling")["metrics"]
    assert metrics == {**sums, **means, "loss:sum": 0.5, "valid_tokens:sum": 2.0}


def test_a_loss_per_token_has_a_scalar_as_the_others_have() -> None:
    scores = Scores(outputs=({"elementwise_loss": float32s(0.5)},), loss=0.5, tokens=1)
    (one,) = msgspec.to_builtins(write_json_scores(scores, "per_token_ce"))["loss_fn_outputs"]
    assert one["loss"]["data"] == [0.5]


def test_a_batch_of_nothing_has_sums_alone() -> None:
    scores = Scores(outputs=(), loss=0.0, tokens=0, metrics={"kl": 0.5, "a:slack": 1.0, "b:max": 2.0})
    answer = msgspec.to_builtins(write_json_scores(scores, "cross_entropy"))
    assert answer["metrics"] == {"b:max": 2.0, "loss:sum": 0.0, "valid_tokens:sum": 0.0}
