"""Results of operations in the words of either client."""

import msgspec
import pytest

from bombus.operations import (
    AbortEpoch,
    AdamParams,
    Array,
    Category,
    CheckpointKind,
    CheckpointLoaded,
    CheckpointSaved,
    CreateModel,
    DType,
    EndModel,
    EpochAborted,
    Failed,
    ForwardBackward,
    LoadWeights,
    LossSpec,
    ModelEnded,
    ModelReady,
    Operation,
    OptimStep,
    Reduction,
    Result,
    SaveWeights,
    Scores,
    StepTaken,
)
from bombus_gateway.operations_wire.dialects import TrainingDialect
from bombus_gateway.operations_wire.results import kill_session_answer, write_result
from bombus_gateway.operations_wire.submission import Submission

TINKER, XORL = TrainingDialect.TINKER, TrainingDialect.XORL
TRAINING, SAMPLER, EXTERNAL = CheckpointKind.TRAINING, CheckpointKind.SAMPLER, CheckpointKind.EXTERNAL
STEP = OptimStep(adam=AdamParams(learning_rate=1e-4), reduction=Reduction.SUM)


def submission(operation: Operation, model: str = "m", sampling_session: str = "") -> Submission:
    return Submission(model=model, seq=1, operation=operation, sampling_session=sampling_session)


def saved(kind: CheckpointKind) -> CheckpointSaved:
    return CheckpointSaved(checkpoint=kind, name="a", folder="/somewhere", address="00ff", size_bytes=10)


@pytest.mark.parametrize(
    ("operation", "result", "tinkers", "xorls"),
    [
        (
            CreateModel(base="b"),
            ModelReady(),
            {"model_id": "m", "type": "create_model"},
            {"model_id": "m", "type": "create_model"},
        ),
        (
            CreateModel(base="", checkpoint="R/training/a"),
            ModelReady(),
            {"path": "tinker://R/weights/a", "model_id": "m", "type": "load_weights"},
            {"path": "xorl://R/weights/a", "model_id": "m", "type": "load_weights"},
        ),
        (
            STEP,
            StepTaken(step=3, divisor=2.0, grad_norm=0.5, metrics={"learning_rate": 1e-4}),
            {"metrics": {"optimizer_step": 3.0, "divisor": 2.0, "grad_norm": 0.5, "learning_rate": 1e-4}, "info": {}},
            {"metrics": {"step": 3.0, "divisor": 2.0, "grad_norm": 0.5, "learning_rate": 1e-4}, "info": {}},
        ),
        (
            STEP,
            StepTaken(step=3, divisor=2.0, grad_norm=0.0, has_gradient=False),
            {"metrics": {"optimizer_step": 3.0, "divisor": 2.0}, "info": {}},
            {"metrics": {"step": 3.0, "divisor": 2.0}, "info": {}},
        ),
        (
            AbortEpoch(),
            EpochAborted(step=3, operations=2),
            {"success": True, "model_id": "m", "step": 3, "forward_backward_step": 2, "info": {}},
            {"success": True, "model_id": "m", "step": 3, "forward_backward_step": 2, "info": {}},
        ),
        (
            SaveWeights(checkpoint=TRAINING, name="a"),
            saved(TRAINING),
            {"path": "tinker://m/weights/a", "type": "save_weights"},
            {"path": "xorl://m/weights/a", "type": "save_weights"},
        ),
        (
            SaveWeights(checkpoint=EXTERNAL, name="a"),
            saved(EXTERNAL),
            {"path": "tinker://m/external_weights/a", "type": "save_weights_external"},
            {"path": "xorl://m/external_weights/a", "type": "save_weights_external"},
        ),
        (
            SaveWeights(checkpoint=SAMPLER, name="a"),
            saved(SAMPLER),
            {
                "path": "tinker://m/sampler_weights/a",
                "model_path": "sampler_weights/a",
                "type": "save_weights_for_sampler",
            },
            {
                "path": "xorl://m/sampler_weights/a",
                "model_path": "sampler_weights/a",
                "type": "save_weights_for_sampler",
            },
        ),
        (
            LoadWeights(checkpoint="R/training/a"),
            CheckpointLoaded(checkpoint="R/training/a", step=3),
            {"path": "tinker://R/weights/a", "model_id": "m", "type": "load_weights"},
            {"path": "xorl://R/weights/a", "model_id": "m", "type": "load_weights"},
        ),
        (
            EndModel(),
            ModelEnded(),
            {"model_id": "m", "type": "unload_model"},
            {"model_id": "m", "type": "unload_model"},
        ),
        (
            STEP,
            Failed(error="The gradient is incomplete.", category=Category.USER),
            {"error": "The gradient is incomplete.", "category": "user"},
            {"error": "The gradient is incomplete.", "category": "user"},
        ),
    ],
)
def test_a_result_is_written_as_each_client_reads_it(
    operation: Operation, result: Result, tinkers: dict[str, object], xorls: dict[str, object]
) -> None:
    for dialect, wanted in ((TINKER, tinkers), (XORL, xorls)):
        answer = write_result(dialect, submission(operation), result)
        assert (answer.status, answer.content_type) == (200, "application/json")
        assert msgspec.json.decode(answer.body) == wanted


def test_a_checkpoint_that_begins_a_session_of_sampling_is_answered_with_the_session() -> None:
    asked = submission(SaveWeights(checkpoint=SAMPLER, name="a"), sampling_session="S:sample:4")
    answer = write_result(TINKER, asked, saved(SAMPLER))
    assert msgspec.json.decode(answer.body) == {
        "type": "save_weights_for_sampler",
        "sampling_session_id": "S:sample:4",
    }


def test_scores_are_protobuf_for_tinker_and_json_for_xorl() -> None:
    scores = Scores(outputs=({"logprobs": Array.of(DType.FLOAT32, [-1.0])},), loss=1.0, tokens=1)
    asked = submission(ForwardBackward(loss=LossSpec("cispo"), data=()))
    assert write_result(TINKER, asked, scores).content_type == "application/x-protobuf"
    answer = write_result(XORL, asked, scores)
    assert answer.content_type == "application/json"
    assert msgspec.json.decode(answer.body)["loss_fn_output_type"] == "cispo"
    with pytest.raises(TypeError, match="OptimStep has no scores"):
        write_result(XORL, submission(STEP), scores)


def test_kill_session_has_a_direct_answer() -> None:
    assert kill_session_answer(XORL, "m", ModelEnded(saved=saved(TRAINING))) == {
        "success": True,
        "message": "The session of m has ended.",
        "checkpoint_path": "xorl://m/weights/a",
    }
    assert kill_session_answer(XORL, "m", ModelEnded())["checkpoint_path"] is None
    refused = kill_session_answer(XORL, "m", Failed(error="There is no m.", category=Category.USER))
    assert refused == {"success": False, "message": "There is no m."}
