"""Write the results of operations for both kinds of client. An answer has the fields that either expects, unless they
clash."""

from bombus.operations import (
    CheckpointKind,
    CheckpointLoaded,
    CheckpointSaved,
    CreateModel,
    EpochAborted,
    Failed,
    ForwardBackward,
    ModelEnded,
    ModelReady,
    Operation,
    Result,
    Scores,
    StepTaken,
)
from bombus_gateway.operations_wire.data.scores import write_json_scores, write_scores
from bombus_gateway.operations_wire.dialects import PROTOBUF, TrainingDialect
from bombus_gateway.operations_wire.futures import FutureAnswer, failed, json_answer
from bombus_gateway.operations_wire.paths import CheckpointPath, path_of_operation
from bombus_gateway.operations_wire.submission import Submission


def write_result(dialect: TrainingDialect, submission: Submission, result: Result) -> FutureAnswer:
    """Return an operation's result as an answer. Raises `TypeError` if the result does not match the operation."""
    if isinstance(result, Failed):
        return failed(result)
    if isinstance(result, Scores):
        return _scores(dialect, submission.operation, result)
    return json_answer(_content(dialect, submission, result))


def kill_session_answer(dialect: TrainingDialect, model: str, result: ModelEnded | Failed) -> dict[str, object]:
    """Return xorl's direct answer to `kill_session`."""
    if isinstance(result, Failed):
        return {"success": False, "message": result.error}
    path = CheckpointPath(model, result.saved.checkpoint, result.saved.name).uri(dialect) if result.saved else None
    return {"success": True, "message": f"The session of {model} has ended.", "checkpoint_path": path}


def _scores(dialect: TrainingDialect, operation: Operation | Failed, scores: Scores) -> FutureAnswer:
    if dialect == TrainingDialect.TINKER:
        return FutureAnswer(200, PROTOBUF, write_scores(scores))
    if not isinstance(operation, ForwardBackward):
        raise TypeError(f"{type(operation).__name__} has no scores")
    return json_answer(write_json_scores(scores, operation.loss.name))


def _content(
    dialect: TrainingDialect,
    submission: Submission,
    result: ModelReady | StepTaken | EpochAborted | CheckpointSaved | CheckpointLoaded | ModelEnded,
) -> dict[str, object]:
    model = submission.model
    match result:
        case ModelReady():
            return _model_ready(dialect, submission)
        case StepTaken():
            # Tinker's recipes log these metrics alongside their own `step`.
            count = "optimizer_step" if dialect == TrainingDialect.TINKER else "step"
            return {"metrics": {count: float(result.step)} | result.figures(), "info": {}}
        case EpochAborted():
            aborted = {"step": result.step, "forward_backward_step": result.operations}
            return {"success": True, "model_id": model, **aborted, "info": {}}
        case CheckpointSaved():
            return _saved(dialect, submission, result)
        case CheckpointLoaded():
            path = path_of_operation(result.checkpoint).uri(dialect)
            return {"path": path, "model_id": model, "type": "load_weights"}
        case ModelEnded():
            return {"model_id": model, "type": "unload_model"}


def _model_ready(dialect: TrainingDialect, submission: Submission) -> dict[str, object]:
    """Return what Tinker's client expects for a new model, created by `create_model` or by loading a checkpoint."""
    made = submission.operation
    if isinstance(made, CreateModel) and made.checkpoint:
        path = path_of_operation(made.checkpoint).uri(dialect)
        return {"path": path, "model_id": submission.model, "type": "load_weights"}
    return {"model_id": submission.model, "type": "create_model"}


def _saved(dialect: TrainingDialect, submission: Submission, saved: CheckpointSaved) -> dict[str, object]:
    path = CheckpointPath(submission.model, saved.checkpoint, saved.name)
    if saved.checkpoint != CheckpointKind.SAMPLER:
        kind = "save_weights" if saved.checkpoint == CheckpointKind.TRAINING else "save_weights_external"
        return {"path": path.uri(dialect), "type": kind}
    answer: dict[str, object] = {"type": "save_weights_for_sampler"}
    if submission.sampling_session:
        return answer | {"sampling_session_id": submission.sampling_session}
    return answer | {"path": path.uri(dialect), "model_path": path.id}
