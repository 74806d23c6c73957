"""Operations on several models: gradients, steps, what fails, and what no model does to another."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bombus.figures import byte_size
from bombus.operations import (
    AbortEpoch,
    AdapterPart,
    AdapterSpec,
    Array,
    Category,
    CheckpointKind,
    CreateModel,
    Datum,
    DType,
    EndModel,
    EpochAborted,
    Failed,
    ForwardBackward,
    LossSpec,
    ModelEnded,
    Operation,
    Reduction,
    Rejected,
    SaveWeights,
)
from bombus_trainer.operations.executor import OperationExecutor
from tests.trainer.operations.small_models import (
    BASE,
    SPEC,
    created,
    datum,
    executor,
    failed,
    floats,
    forward_backward,
    ints,
    logprobs,
    optim_step,
    random_data,
    scored,
    stepped,
)

IMPORTANCE = LossSpec("importance_sampling")


def address(made: OperationExecutor, model: str, name: str) -> str:
    """Return the hash of a model's weights."""
    saved = made.execute(model, SaveWeights(checkpoint=CheckpointKind.SAMPLER, name=name))
    return getattr(saved, "address", str(saved))


def gradient_norm(made: OperationExecutor, model: str) -> float:
    """Return the norm of a model's gradient, and clear it without changing its weights."""
    return stepped(made, model, optim_step(learning_rate=0.0)).grad_norm


# ---- losses ---------------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_transformers_in_the_order_of_the_data(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path, {"bin_tokens": 16})
    created(made, "a")
    data = random_data(3, 7)
    found = scored(made, "a", forward_backward(*data, forward_only=True))
    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for one, output in zip(data, found.outputs, strict=True):
        tokens = torch.frombuffer(bytearray(one.tokens), dtype=torch.int32).long()
        targets = torch.tensor(one.inputs["target_tokens"].values(), dtype=torch.int64)
        with torch.no_grad():
            wanted = torch.log_softmax(reference(tokens[None]).logits[0], -1)[torch.arange(len(tokens)), targets]
        assert output["logprobs"].values() == pytest.approx(wanted.tolist(), abs=1e-5)
        weights = torch.tensor(one.inputs["weights"].values())
        assert output["elementwise_loss"].values() == pytest.approx((-weights * wanted).tolist(), abs=1e-4)


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_packed_results_are_those_of_one_sequence_at_a_time(base: Path, tmp_path: Path, loss: str) -> None:
    data = random_data(4, 9)
    if loss == "importance_sampling":
        data = tuple(
            Datum(
                one.tokens,
                {
                    "target_tokens": one.inputs["target_tokens"],
                    "logprobs": floats(*[-4.0] * (len(one.tokens) // 4)),
                    "advantages": one.inputs["weights"],
                },
            )
            for one in data
        )
    made = executor(base, tmp_path)
    created(made, "packed")
    created(made, "alone")
    packed = scored(made, "packed", forward_backward(*data, loss=LossSpec(loss)))
    alone = [scored(made, "alone", forward_backward(one, loss=LossSpec(loss))) for one in data]
    assert logprobs(packed) == pytest.approx([value for each in alone for value in logprobs(each)], abs=1e-5)
    assert packed.loss == pytest.approx(sum(each.loss for each in alone), rel=1e-5)
    assert packed.tokens == sum(each.tokens for each in alone)
    assert gradient_norm(made, "packed") == pytest.approx(gradient_norm(made, "alone"), rel=1e-5)


def test_several_targets_of_a_token_are_the_sum_of_its_targets_alone(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    for model in ("wide", "narrow"):
        created(made, model)
    tokens = [5, 6, 7]
    wide = datum(tokens, ints(1, 2, 3, 4, 5, 6, shape=(3, 2)), weights=weights_of(0.5, -1.0, 2.0, 0.0, 1.0, 0.25))
    first = datum(tokens, [1, 3, 5], weights=floats(0.5, 2.0, 1.0))
    second = datum(tokens, [2, 4, 6], weights=floats(-1.0, 0.0, 0.25))
    together = scored(made, "wide", forward_backward(wide))
    apart = scored(made, "narrow", forward_backward(first, second))
    one, two = (output["logprobs"].values() for output in apart.outputs)
    assert together.outputs[0]["logprobs"].shape == (3, 2)
    assert logprobs(together) == pytest.approx(
        [value for pair in zip(one, two, strict=True) for value in pair], abs=1e-5
    )
    assert (together.loss, together.tokens) == pytest.approx((apart.loss, 3), rel=1e-5)
    assert together.outputs[0]["elementwise_loss"].shape == (3,)
    assert gradient_norm(made, "wide") == pytest.approx(gradient_norm(made, "narrow"), rel=1e-5)


def weights_of(*values: float) -> Array:
    return Array.of(DType.FLOAT32, values, (3, 2))


def test_the_z_loss_is_the_square_of_the_logits_normalizer(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a", None)
    one = datum([5, 6, 7], weights=floats(1.0, 0.0, 1.0))
    plain = scored(made, "a", forward_backward(one))
    made.execute("a", AbortEpoch())
    with_z = scored(made, "a", forward_backward(one, loss=LossSpec("cross_entropy", {"z_loss_coef": 0.1})))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    logits = model(torch.tensor([[5, 6, 7]])).logits[0, [0, 2]]
    z = 0.1 * logits.logsumexp(-1).square().sum()
    assert with_z.loss - plain.loss == pytest.approx(float(z.detach()), rel=1e-4)
    (z - torch.log_softmax(logits, -1)[[0, 1], [6, 0]].sum()).backward()
    squares = [parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None]
    assert gradient_norm(made, "a") == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-4)


def test_a_mask_multiplies_the_terms_and_leaves_the_logprobs(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    inputs = {"logprobs": floats(-1.0, -2.0, -3.0), "advantages": floats(1.0, -1.0, 2.0)}
    plain = scored(made, "a", forward_backward(datum([1, 2, 3], **inputs), loss=IMPORTANCE, forward_only=True))
    masked = datum([1, 2, 3], mask=floats(0.5, 0.0, 2.0), **inputs)
    found = scored(made, "a", forward_backward(masked, loss=IMPORTANCE, forward_only=True))
    first, _, third = plain.outputs[0]["elementwise_loss"].values()
    assert found.outputs[0]["elementwise_loss"].values() == pytest.approx([0.5 * first, 0.0, 2.0 * third])
    assert (logprobs(found), found.tokens) == (logprobs(plain), 2)
    assert found.loss == pytest.approx(0.5 * first + 2.0 * third)


# ---- gradients ------------------------------------------------------------------------------------------------------


def test_gradients_of_several_operations_are_added(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    data = random_data(5, 6)
    for model in ("whole", "parts", "halves"):
        created(made, model)
    scored(made, "whole", forward_backward(*data))
    for one in data:
        scored(made, "parts", forward_backward(one))
    halves = (forward_backward(*data[:3]), forward_backward(*data[3:]))
    for half in halves:
        scored(made, "halves", half)
    steps = [stepped(made, model, optim_step()) for model in ("whole", "parts", "halves")]
    assert [step.grad_norm for step in steps] == pytest.approx([steps[0].grad_norm] * 3, rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"share_prefixes": False},
        {"enable_packing": False},
        {"bin_tokens": 16},
        {"logits_bytes_max": 1 << 16},
    ],
)
def test_how_a_job_spends_memory_changes_no_gradient(base: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    norms = []
    for number, each in enumerate(({}, changes)):
        made = executor(base, tmp_path / str(number), each)
        created(made, "a")
        scored(made, "a", forward_backward(*random_data(5, 6)))
        norms.append(gradient_norm(made, "a"))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_the_same_operations_give_the_same_bits(base: Path, tmp_path: Path) -> None:
    addresses = []
    for name in ("one", "two"):
        made = executor(base, tmp_path / name)
        created(made, "a")
        for seed in range(3):
            scored(made, "a", forward_backward(*random_data(seed, 5)))
            stepped(made, "a", optim_step())
        addresses.append(address(made, "a", "end"))
    assert addresses[0] == addresses[1]


def test_forward_only_leaves_no_gradient_and_counts_no_tokens(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    data = random_data(6, 3)
    only = scored(made, "a", forward_backward(*data, forward_only=True))
    step = stepped(made, "a", optim_step(Reduction.TOKEN_MEAN))
    assert (step.step, step.divisor, step.grad_norm) == (1, 1.0, 0.0)
    assert logprobs(scored(made, "a", forward_backward(*data))) == logprobs(only)


def test_a_step_without_a_gradient_counts_and_changes_nothing(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    before = address(made, "a", "before")
    assert scored(made, "a", forward_backward()).tokens == 0
    assert stepped(made, "a", optim_step(weight_decay=0.5)).step == 1
    assert address(made, "a", "after") == before


def test_a_token_mean_divides_by_the_tokens_that_counted_since_the_last_step(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "sum")
    created(made, "mean")
    first = datum([1, 2, 3], weights=floats(1.0, 0.0, 2.0))
    second = datum([4, 5], weights=floats(1.0, 1.0))
    for model in ("sum", "mean"):
        scored(made, model, forward_backward(first))
        scored(made, model, forward_backward(second))
        scored(made, model, forward_backward(first, forward_only=True))
    summed = stepped(made, "sum", optim_step())
    mean = stepped(made, "mean", optim_step(Reduction.TOKEN_MEAN))
    assert (summed.divisor, mean.divisor) == (1.0, 4.0)
    assert mean.grad_norm == pytest.approx(summed.grad_norm / 4, rel=1e-5)
    scored(made, "mean", forward_backward(second))
    assert stepped(made, "mean", optim_step(Reduction.TOKEN_MEAN)).divisor == 2.0


# ---- what fails -----------------------------------------------------------------------------------------------------


def test_a_failed_operation_spoils_its_gradient_and_the_step_says_so_once(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    before = address(made, "a", "before")
    scored(made, "a", forward_backward(*random_data(1, 3)))
    refused = failed(made, "a", forward_backward(datum([1, 99])))
    assert (refused.category, "token id 99" in refused.error) == (Category.USER, True)
    scored(made, "a", forward_backward(*random_data(2, 3)))
    step = failed(made, "a", optim_step())
    assert step.category == Category.USER
    assert "a forward_backward since step 0 failed (datum 0 has the token id 99" in step.error
    assert "It was cleared; send the data again, then step" in step.error
    assert address(made, "a", "between") == before
    scored(made, "a", forward_backward(*random_data(1, 3)))
    assert stepped(made, "a", optim_step()).step == 1


def test_a_failed_forward_spoils_nothing(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    scored(made, "a", forward_backward(*random_data(1, 3)))
    failed(made, "a", forward_backward(datum([1, 99]), forward_only=True))
    assert stepped(made, "a", optim_step()).grad_norm > 0.0


def test_what_was_rejected_fails_in_its_turn_and_spoils_the_gradient_where_it_counts(
    base: Path, tmp_path: Path
) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    failure = Failed(error="data is not a list", category=Category.USER)
    scored(made, "a", forward_backward(*random_data(1, 3)))
    assert made.execute("a", Rejected(failure=failure)) == failure
    assert stepped(made, "a", optim_step()).step == 1
    assert made.execute("a", Rejected(failure=failure, counts=True)) == failure
    assert "a forward_backward since step 1 failed (data is not a list)" in failed(made, "a", optim_step()).error
    assert made.execute("nobody", Rejected(failure=failure, counts=True)) == failure


def test_a_model_that_was_dropped_is_gone_and_one_that_was_cleared_has_no_gradient(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    scored(made, "a", forward_backward(*random_data(1, 3)))
    failed(made, "a", forward_backward(datum([99])))
    made.clear("a")
    assert stepped(made, "a", optim_step()).grad_norm == 0.0
    made.drop("a")
    made.drop("a")
    assert made.models == {}


def test_an_aborted_epoch_is_forgotten(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    scored(made, "a", forward_backward(*random_data(1, 3)))
    scored(made, "a", forward_backward(*random_data(2, 3)))
    failed(made, "a", forward_backward(datum([1, 99])))
    assert made.execute("a", AbortEpoch()) == EpochAborted(step=0, operations=2)
    assert stepped(made, "a", optim_step()).grad_norm == 0.0


def test_a_loss_that_is_not_finite_fails_and_names_its_datum(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    big = datum([1, 2], logprobs=floats(-1.0, -30.0), advantages=floats(1.0, 3e38))
    fine = datum([1, 2], logprobs=floats(-1.0, -1.0), advantages=floats(1.0, 1.0))
    found = failed(made, "a", forward_backward(fine, big, loss=IMPORTANCE))
    assert found.category == Category.USER
    assert "the loss of datum 1 is not finite (-inf): look for extreme weights" in found.error
    assert "the loss of datum 1" in failed(made, "a", optim_step()).error


def test_a_gradient_that_is_not_finite_is_cleared_without_a_step(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    before = address(made, "a", "before")
    scored(made, "a", forward_backward(datum([1], weights=floats(2e37))))
    assert "the norm of the gradient since step 0 is" in failed(made, "a", optim_step()).error
    assert address(made, "a", "after") == before
    assert stepped(made, "a", optim_step()).grad_norm == 0.0


def test_a_step_with_wrong_parameters_keeps_its_gradient(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    scored(made, "a", forward_backward(*random_data(1, 3)))
    assert "learning_rate is -1.0" in failed(made, "a", optim_step(learning_rate=-1.0)).error
    assert stepped(made, "a", optim_step()).grad_norm > 0.0


def test_what_is_asked_of_no_model_is_refused(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path, models_max=1, rank_max=8)
    nothing: tuple[Operation, ...] = (forward_backward(), optim_step(), AbortEpoch(), EndModel())
    for each in nothing:
        assert failed(made, "x", each).error == "there is no model 'x' here: create it first"
    for model, operation, why in (
        ("../x", CreateModel(base=BASE, adapter=SPEC), "'../x' cannot be the name of a model"),
        (
            "a",
            CreateModel(base="other", adapter=SPEC),
            "the base of the models here is tiny-base, but this one asks for",
        ),
        ("a", CreateModel(base=BASE, adapter=AdapterSpec(rank=9, alpha=1.0)), "is 9: it must be 1 to 8"),
        ("a", CreateModel(base=BASE, adapter=AdapterSpec(rank=1, alpha=0.0)), "alpha of an adapter is 0.0"),
        ("a", CreateModel(base=BASE, adapter=AdapterSpec(rank=1, alpha=1.0, seed=1 << 63)), "a 64-bit integer"),
        ("a", CreateModel(base=BASE, adapter=AdapterSpec(rank=1, alpha=1.0, parts=())), "no layers of the parts"),
        (
            "a",
            CreateModel(base=BASE, adapter=AdapterSpec(rank=1, alpha=1.0, parts=(AdapterPart.UNEMBEDDING,))),
            "leave unembedding out of its parts",
        ),
        (
            "a",
            CreateModel(base=BASE, adapter=AdapterSpec(rank=1, alpha=1.0, targets=("nothing",))),
            "'nothing' is not in this model, which has down_proj, gate_proj",
        ),
    ):
        assert why in failed(made, model, operation).error
    created(made, "a")
    assert "there is a model a already" in failed(made, "a", CreateModel(base=BASE, adapter=SPEC)).error
    assert "there are 1 models here, the maximum" in failed(made, "b", CreateModel(base=BASE, adapter=SPEC)).error


def test_a_model_is_refused_where_the_memory_that_it_and_the_others_may_take_is_not_free(
    base: Path, tmp_path: Path
) -> None:
    """With many models on one engine the system ended the trainer at the first steps."""
    left = [0]
    made = executor(base, tmp_path, free=lambda device: left[0])
    create = CreateModel(base=BASE, adapter=SPEC)
    assert "there is no room for this model" in failed(made, "a", create).error
    whole = failed(made, "a", CreateModel(base=BASE)).error
    assert "no room for this model" in whole
    left = [1 << 40]
    numbers = created(made, "a").parameters
    tensors = len(made._model("a").parameters)
    unborn = 12 * numbers + 4 * tensors  # the gradient of `a`, both moments, and their counters
    for taken, scores in ((unborn, False), (4 * numbers, True)):
        if scores:
            scored(made, "a", forward_backward(*random_data(1, 2)))
            stepped(made, "a", optim_step())
        left[0] = 16 * numbers + taken - 1
        why = failed(made, "b", create).error
        assert f"its {numbers:,} parameters take {byte_size(16 * numbers)} with their gradient and optimizer" in why
        assert (
            f"the 1 model here may still take {byte_size(taken)}, with only {byte_size(left[0])} of memory free" in why
        )
        assert "End a model, ask for a lower rank or for fewer layers" in why
        left[0] += 1
        created(made, "b")
        made.execute("b", EndModel())


def test_optimizers_that_wait_in_files_take_no_memory(base: Path, tmp_path: Path) -> None:
    left = [1 << 40]
    made = executor(base, tmp_path, free=lambda device: left[0], optimizer_bytes_max=0)
    numbers = created(made, "a").parameters
    left[0] = (8 + 8 + 4) * numbers + 4 * len(made._model("a").parameters)  # one optimizer at a time
    created(made, "b")


# ---- several models --------------------------------------------------------------------------------------------------


def test_no_model_changes_another_by_one_bit(base: Path, tmp_path: Path) -> None:
    """A model alone, and beside one of another rank that trains between its operations and fails now and then."""

    def trained(beside: bool) -> list[str]:
        made = executor(base, tmp_path / str(beside))
        created(made, "a")
        if beside:
            created(made, "b", AdapterSpec(rank=16, alpha=1.0, parts=(AdapterPart.MLP,)))
        addresses = []
        for seed in range(3):
            scored(made, "a", forward_backward(*random_data(seed, 4)))
            if beside:
                scored(made, "b", forward_backward(*random_data(seed + 50, 6)))
                if seed == 1:
                    failed(made, "b", forward_backward(datum([99])))
            scored(made, "a", forward_backward(*random_data(seed + 10, 3)))
            if beside:
                made.execute("b", optim_step(learning_rate=0.5))
            stepped(made, "a", optim_step())
            addresses.append(address(made, "a", f"step-{seed}"))
        return addresses

    assert trained(beside=True) == trained(beside=False)


def test_parts_and_targets_say_which_layers_have_adapters(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    # Two layers of width 32, with two key heads of 8, and an MLP of 64: (in + out) for each of a layer's matrices
    attention, mlp = 2 * (64 + 48 + 48 + 64), 2 * (96 + 96 + 96)
    for number, (spec, wanted) in enumerate(
        [
            (AdapterSpec(rank=3, alpha=1.0), attention + mlp),
            (AdapterSpec(rank=3, alpha=1.0, parts=(AdapterPart.ATTENTION,)), attention),
            (AdapterSpec(rank=3, alpha=1.0, parts=(AdapterPart.MLP,)), mlp),
            (AdapterSpec(rank=3, alpha=1.0, targets=("q_proj",)), 2 * 64),
        ]
    ):
        ready = created(made, f"m{number}", spec)
        assert (ready.adapter, ready.parameters) == (spec, 3 * wanted)


def test_adapters_of_two_seeds_differ_and_of_one_seed_do_not(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    for model, seed in (("a", 1), ("b", 1), ("c", 2)):
        created(made, model, AdapterSpec(rank=4, alpha=8.0, seed=seed))
    a, b, c = (address(made, model, "new") for model in "abc")
    assert a == b != c


def test_a_new_adapter_is_the_base(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    created(made, "b", AdapterSpec(rank=8, alpha=64.0, seed=9))
    one = forward_backward(*random_data(1, 3), forward_only=True)
    assert logprobs(scored(made, "a", one)) == logprobs(scored(made, "b", one))


def test_a_model_of_all_weights_is_alone_and_begins_again_from_its_base(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    one: ForwardBackward = forward_backward(*random_data(1, 3))
    ready = created(made, "full", None)
    assert (ready.adapter, ready.parameters) == (None, 22_688)
    assert "full trains all weights of the base" in failed(made, "a", CreateModel(base=BASE, adapter=SPEC)).error
    begun = logprobs(scored(made, "full", one))
    stepped(made, "full", optim_step())
    assert logprobs(scored(made, "full", one)) != begun
    assert made.execute("full", EndModel(reset_weights=True)) == ModelEnded()
    assert logprobs(scored(made, "full", one)) == begun
    assert made.models == {"full": 0}
    stepped(made, "full", optim_step())
    assert made.execute("full", EndModel()) == ModelEnded()
    created(made, "a")
    assert logprobs(scored(made, "a", one)) == begun
    assert "1 models use it: end them first" in failed(made, "full", CreateModel(base=BASE)).error
