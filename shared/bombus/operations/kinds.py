"""Training operations, and their results.

Operations on one model run in the order in which they arrived. `ForwardBackward` adds to a gradient, which the next
`OptimStep` or `AbortEpoch` clears. Operations spell out whatever differs between the APIs that clients use: an
`OptimStep` says what the gradient is divided by, and a loss has all of its parameters.
"""

from enum import StrEnum
from typing import TypeAlias

import msgspec

from bombus.hive.decoding import decoded
from bombus.operations.arrays import Array


class Reduction(StrEnum):
    """The number by which the sum of all tokens' gradients is divided at a step: 1, or the number of tokens that
    counted in the loss."""

    SUM = "sum"
    TOKEN_MEAN = "token_mean"


class AdapterPart(StrEnum):
    """A part of a transformer whose linear layers an adapter may change."""

    ATTENTION = "attention"
    MLP = "mlp"
    UNEMBEDDING = "unembedding"


class CheckpointKind(StrEnum):
    TRAINING = "training"  # weights and optimizer state
    SAMPLER = "sampler"  # weights only, for an inference engine
    EXTERNAL = "external"  # weights only, for use outside the hive


class Category(StrEnum):
    """Who caused an operation to fail."""

    USER = "user"
    SERVER = "server"


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA adapter (Hu et al. 2021, arXiv:2106.09685): W + alpha / rank B A, with A drawn from `seed` and B zero.

    `targets` are PEFT's names for layers, such as `q_proj`. If `targets` is empty, all layers of the `parts` have
    adapters.
    """

    rank: int
    alpha: float
    seed: int = 0
    parts: tuple[AdapterPart, ...] = (AdapterPart.ATTENTION, AdapterPart.MLP)
    targets: tuple[str, ...] = ()


class RateSchedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A learning rate schedule over a model's steps: linear warm-up, then constant or decaying to a floor."""

    kind: str = "constant"  # "constant", "linear" or "cosine"
    warmup_steps: int = 0
    total_steps: int = 0  # the floor is reached one step after this one
    min_ratio: float = 0.0  # the floor, as a fraction of the learning rate


class AdamParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with decoupled `weight_decay`.

    `grad_clip_norm` bounds the norm of the whole gradient after its division; 0 disables clipping. With a `schedule`,
    `learning_rate` is its peak.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    schedule: RateSchedule | None = None


class Datum(msgspec.Struct, frozen=True, array_like=True):
    """One sequence: N tokens (int32), and the inputs of its loss, such as `target_tokens` and `weights`.

    Token i predicts target i: targets are already shifted. They are [N], or [N, K] with K weighted targets per token.
    """

    tokens: bytes
    inputs: dict[str, Array]


class LossSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The name of a loss, with its parameters."""

    name: str
    config: dict[str, float | str] = {}


class CreateModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="create_model", tag_field="kind"):
    """Create a model from `base`, in order to train an adapter on it or, without `adapter`, all of its weights.

    With `checkpoint`, the model starts from that checkpoint, with its adapter; `with_optimizer` restores its optimizer
    state too.
    """

    base: str
    adapter: AdapterSpec | None = None
    checkpoint: str = ""
    with_optimizer: bool = False


class ForwardBackward(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="forward_backward", tag_field="kind"
):
    """Compute a loss and, unless `forward_only`, add its gradient to the model's gradient.

    The loss is the sum over all tokens of all data.
    """

    loss: LossSpec
    data: tuple[Datum, ...]
    forward_only: bool = False


class OptimStep(msgspec.Struct, frozen=True, kw_only=True, tag="optim_step", tag_field="kind"):
    """Divide the gradient according to `reduction`, take a step with it, and clear it."""

    adam: AdamParams
    reduction: Reduction


class AbortEpoch(msgspec.Struct, frozen=True, kw_only=True, tag="abort_epoch", tag_field="kind"):
    """Clear the gradient accumulated since the last step. This also clears the failure of any operation that would have
    added to the gradient."""


class SaveWeights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="save_weights", tag_field="kind"):
    """Save the model under `name` or, if that is "", under the time at which the operation was written to the log.

    `ttl_s` is how long the saved model is kept; 0 means forever. For `EXTERNAL` checkpoints, `merged` saves the whole
    model with its adapter merged into it, instead of the adapter alone.
    """

    checkpoint: CheckpointKind
    name: str
    overwrite: bool = False
    ttl_s: float = 0.0
    merged: bool = False


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="load_weights", tag_field="kind"):
    """Continue from a checkpoint of the same shape, with a new optimizer unless `with_optimizer` is set."""

    checkpoint: str
    with_optimizer: bool = False


class EndModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="end_model", tag_field="kind"):
    """Delete the model, after saving it under `save_as`, if given, for `ttl_s` seconds (0 means forever).

    With `reset_weights`, a full-weight model is reset to its base instead of being deleted.
    """

    save_as: str = ""
    reset_weights: bool = False
    ttl_s: float = 0.0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", tag_field="kind"):
    """The operation failed for the reason in `error`, and changed nothing.

    If the operation was supposed to add to a gradient, that gradient is now incomplete.
    """

    error: str
    category: Category


class Rejected(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="rejected", tag_field="kind"):
    """Fail with `failure` when the operation's turn comes, because the gateway refused the client's request.

    `counts` says that the operation would have added to the gradient. In that case the gradient is incomplete, so the
    next step fails.
    """

    failure: Failed
    counts: bool = False


Operation: TypeAlias = (
    CreateModel | ForwardBackward | OptimStep | AbortEpoch | SaveWeights | LoadWeights | EndModel | Rejected
)


class ModelReady(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="model_ready", tag_field="kind"):
    """The model was created, with this adapter and `parameters` trained parameters.

    `loaded` is a hash of the checkpoint from which the model starts, or "" if there is none.
    """

    adapter: AdapterSpec | None = None
    parameters: int = 0
    loaded: str = ""


class Scores(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="scores", tag_field="kind"):
    """The outputs of a loss: arrays by name for each datum (`logprobs` has the shape of its targets), and sums.

    `loss` is the sum whose gradient was computed, and `tokens` is the number of tokens that counted in it.
    """

    outputs: tuple[dict[str, Array], ...]
    loss: float
    tokens: int
    metrics: dict[str, float] = {}


class StepTaken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step_taken", tag_field="kind"):
    """The model took step number `step`. The gradient was divided by `divisor`; `grad_norm` is its norm after the
    division.

    If there was no gradient (`has_gradient` is false), `grad_norm` is 0.
    """

    step: int
    divisor: float
    grad_norm: float
    metrics: dict[str, float] = {}
    has_gradient: bool = True

    def figures(self) -> dict[str, float]:
        """Return the metrics to report for the step."""
        norm = {"grad_norm": self.grad_norm} if self.has_gradient else {}
        return {**norm, "divisor": self.divisor, **self.metrics}


class EpochAborted(msgspec.Struct, frozen=True, kw_only=True, tag="epoch_aborted", tag_field="kind"):
    """The gradient that `operations` operations had accumulated after `step` was cleared."""

    step: int
    operations: int


class CheckpointSaved(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="checkpoint_saved", tag_field="kind"
):
    """A checkpoint was written to `folder`. `address`, a hash of its weights (hex), identifies the weights."""

    checkpoint: CheckpointKind
    name: str
    folder: str
    address: str
    size_bytes: int


class CheckpointLoaded(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="checkpoint_loaded", tag_field="kind"
):
    """The model continues from a checkpoint. `loaded` is a hash of the state that was loaded."""

    checkpoint: str
    step: int
    loaded: str = ""


class ModelEnded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="model_ended", tag_field="kind"):
    """The model was deleted or reset. `saved` is the checkpoint that was made first, if any."""

    saved: CheckpointSaved | None = None


Result: TypeAlias = (
    ModelReady | Scores | StepTaken | EpochAborted | CheckpointSaved | CheckpointLoaded | ModelEnded | Failed
)

_operations: msgspec.msgpack.Decoder[Operation] = msgspec.msgpack.Decoder(Operation)
_results: msgspec.msgpack.Decoder[Result] = msgspec.msgpack.Decoder(Result)
_encoder = msgspec.msgpack.Encoder(order="deterministic")  # protobuf's maps are ordered differently in each process


def encode_operation(operation: Operation) -> bytes:
    """Return an operation's bytes. Equal operations have equal bytes in every process, because operations are
    identified by digests of their bytes."""
    return _encoder.encode(operation)


def decode_operation(body: bytes) -> Operation:
    """Decode an operation. Raises `msgspec.MsgspecError` if the body is not an operation."""
    return decoded(_operations.decode, body)


def encode_result(result: Result) -> bytes:
    return _encoder.encode(result)


def decode_result(body: bytes) -> Result:
    """Decode a result. Raises `msgspec.MsgspecError` if the body is not a result."""
    return decoded(_results.decode, body)
