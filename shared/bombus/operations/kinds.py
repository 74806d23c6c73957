"""Operations of training, and their results.

A caller's operations on one model run in the order in which they came. `ForwardBackward` adds to a gradient, which the
next `OptimStep` or `AbortEpoch` takes away. What the clients' dialects differ in is said here in so many words: an
`OptimStep` says what the gradient is divided by, and a loss has its parameters.
"""

from enum import StrEnum
from typing import TypeAlias

import msgspec

from bombus.hive.decoding import decoded
from bombus.operations.arrays import Array


class Reduction(StrEnum):
    """What the sum of the gradients of all tokens is divided by at a step: 1, or the tokens that counted."""

    SUM = "sum"
    TOKEN_MEAN = "token_mean"


class AdapterPart(StrEnum):
    """A part of a transformer whose linear layers an adapter may change."""

    ATTENTION = "attention"
    MLP = "mlp"
    UNEMBEDDING = "unembedding"


class CheckpointKind(StrEnum):
    TRAINING = "training"  # weights and the optimizer's state
    SAMPLER = "sampler"  # weights alone, for an inference engine
    EXTERNAL = "external"  # weights alone, for others


class Category(StrEnum):
    """Whose mistake made an operation fail."""

    USER = "user"
    SERVER = "server"


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA adapter (Hu et al. 2021, arXiv:2106.09685): W + alpha / rank B A, with A drawn from `seed` and B zero.

    `targets` names layers as PEFT does, such as `q_proj`; without them the layers of all `parts` have adapters.
    """

    rank: int
    alpha: float
    seed: int = 0
    parts: tuple[AdapterPart, ...] = (AdapterPart.ATTENTION, AdapterPart.MLP)
    targets: tuple[str, ...] = ()


class RateSchedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A learning rate that changes with the steps of its model: linear warm-up, then constant or decay to a floor."""

    kind: str = "constant"  # or linear, or cosine
    warmup_steps: int = 0
    total_steps: int = 0  # the step after it is the first at the floor
    min_ratio: float = 0.0  # the floor, as a part of the rate


class AdamParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): `weight_decay` is decoupled.

    `grad_clip_norm` bounds the norm of the whole gradient, after its division; 0 bounds nothing. With a `schedule`,
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
    """One sequence: N tokens (int32), and what its loss needs for each, such as `target_tokens` and `weights`.

    Token i predicts target i: targets are shifted already. They are [N], or [N, K] for K weighted targets each.
    """

    tokens: bytes
    inputs: dict[str, Array]


class LossSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A loss by its name, with its parameters."""

    name: str
    config: dict[str, float | str] = {}


class CreateModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="create_model", tag_field="kind"):
    """Make a model from `base`: an adapter on it, or with none all of its weights.

    With `checkpoint` it begins there, and the adapter is the checkpoint's; `with_optimizer` takes its optimizer too.
    """

    base: str
    adapter: AdapterSpec | None = None
    checkpoint: str = ""
    with_optimizer: bool = False


class ForwardBackward(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="forward_backward", tag_field="kind"
):
    """Compute a loss, and add its gradient to the model's unless `forward_only`.

    The loss is the sum over all tokens of all data.
    """

    loss: LossSpec
    data: tuple[Datum, ...]
    forward_only: bool = False


class OptimStep(msgspec.Struct, frozen=True, kw_only=True, tag="optim_step", tag_field="kind"):
    """Divide the gradient as `reduction` says, take a step with it, and clear it."""

    adam: AdamParams
    reduction: Reduction


class AbortEpoch(msgspec.Struct, frozen=True, kw_only=True, tag="abort_epoch", tag_field="kind"):
    """Clear the gradient since the last step, and forget that an operation on it failed."""


class SaveWeights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="save_weights", tag_field="kind"):
    """Save the model under a name, or where that is "" under the time at which the log took the operation.

    `ttl_s` is how long it is kept; 0 is forever. `merged` is for others (`EXTERNAL`): the whole model with its
    adapter in it, in place of the adapter alone.
    """

    checkpoint: CheckpointKind
    name: str
    overwrite: bool = False
    ttl_s: float = 0.0
    merged: bool = False


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="load_weights", tag_field="kind"):
    """Go on from a checkpoint of the same shape; without `with_optimizer` with a new optimizer."""

    checkpoint: str
    with_optimizer: bool = False


class EndModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="end_model", tag_field="kind"):
    """Save the model under `save_as`, if that is given, for `ttl_s` (0 is forever), and forget it.

    With `reset_weights` a model of full weights begins again from its base instead of being forgotten.
    """

    save_as: str = ""
    reset_weights: bool = False
    ttl_s: float = 0.0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", tag_field="kind"):
    """The operation changed nothing but, where it belonged to a gradient, the gradient's standing: `error` says why."""

    error: str
    category: Category


class Rejected(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="rejected", tag_field="kind"):
    """Fail: the gateway could not understand what its client sent, and says so in the operation's turn.

    It `counts` where it would have added to the gradient, which then lacks something: its next step fails.
    """

    failure: Failed
    counts: bool = False


Operation: TypeAlias = (
    CreateModel | ForwardBackward | OptimStep | AbortEpoch | SaveWeights | LoadWeights | EndModel | Rejected
)


class ModelReady(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="model_ready", tag_field="kind"):
    """The model is there, with this adapter; `parameters` of it are trained.

    `loaded` is a hash of the checkpoint that it begins at, if it does.
    """

    adapter: AdapterSpec | None = None
    parameters: int = 0
    loaded: str = ""


class Scores(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="scores", tag_field="kind"):
    """What a loss computed: for each datum its arrays by name (`logprobs` has its targets' shape), and sums.

    `loss` is the sum that the gradient was taken of; `tokens` is how many counted in it.
    """

    outputs: tuple[dict[str, Array], ...]
    loss: float
    tokens: int
    metrics: dict[str, float] = {}


class StepTaken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step_taken", tag_field="kind"):
    """A step was taken, the `step`th of this model. The gradient was divided by `divisor` and had `grad_norm` then.

    Without a gradient there was none to be measured, and `grad_norm` is 0.
    """

    step: int
    divisor: float
    grad_norm: float
    metrics: dict[str, float] = {}
    has_gradient: bool = True

    def figures(self) -> dict[str, float]:
        """Return what is shown of the step."""
        norm = {"grad_norm": self.grad_norm} if self.has_gradient else {}
        return {**norm, "divisor": self.divisor, **self.metrics}


class EpochAborted(msgspec.Struct, frozen=True, kw_only=True, tag="epoch_aborted", tag_field="kind"):
    """The gradient of `operations` operations after `step` was cleared."""

    step: int
    operations: int


class CheckpointSaved(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="checkpoint_saved", tag_field="kind"
):
    """A checkpoint was written to `folder`. Its `address`, a hash of its weights (hex), says what they are."""

    checkpoint: CheckpointKind
    name: str
    folder: str
    address: str
    size_bytes: int


class CheckpointLoaded(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="checkpoint_loaded", tag_field="kind"
):
    """The model continues from a checkpoint; `loaded` is a hash of what it has taken from it."""

    checkpoint: str
    step: int
    loaded: str = ""


class ModelEnded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="model_ended", tag_field="kind"):
    """The model is gone; `saved` names the checkpoint that was made of it first."""

    saved: CheckpointSaved | None = None


Result: TypeAlias = (
    ModelReady | Scores | StepTaken | EpochAborted | CheckpointSaved | CheckpointLoaded | ModelEnded | Failed
)

_operations: msgspec.msgpack.Decoder[Operation] = msgspec.msgpack.Decoder(Operation)
_results: msgspec.msgpack.Decoder[Result] = msgspec.msgpack.Decoder(Result)
_encoder = msgspec.msgpack.Encoder(order="deterministic")  # protobuf's maps have another order in each process


def encode_operation(operation: Operation) -> bytes:
    """Return the bytes of an operation: the same for equal ones, in every process, since it is known by its digest."""
    return _encoder.encode(operation)


def decode_operation(body: bytes) -> Operation:
    """Raises `msgspec.MsgspecError` for what is not an operation."""
    return decoded(_operations.decode, body)


def encode_result(result: Result) -> bytes:
    return _encoder.encode(result)


def decode_result(body: bytes) -> Result:
    """Raises `msgspec.MsgspecError` for what is not a result."""
    return decoded(_results.decode, body)
