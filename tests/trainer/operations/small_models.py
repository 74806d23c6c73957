"""What the tests of operations share: an executor with a tiny base, and data for it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from bombus.operations import (
    AdamParams,
    AdapterSpec,
    Array,
    CreateModel,
    Datum,
    DType,
    Failed,
    ForwardBackward,
    LossSpec,
    ModelReady,
    Operation,
    OptimStep,
    Reduction,
    Scores,
    StepTaken,
)
from bombus_trainer.operations.executor import OperationExecutor
from bombus_trainer.operations.memory import free_bytes
from bombus_trainer.operations.settings import ExecutorSettings
from tests.trainer.small_batches import tiny_settings

BASE = "tiny-base"
SPEC = AdapterSpec(rank=4, alpha=8.0, seed=1)
CROSS_ENTROPY = LossSpec("cross_entropy")


def executor(
    folder: Path,
    root: Path,
    changes: Mapping[str, object] = {},
    free: Callable[[torch.device], int] = free_bytes,
    **options: int,
) -> OperationExecutor:
    """Make an executor on the model in `folder`, which callers name `BASE`. It writes below `root`.

    `changes` are fields of its `tiny_settings`, `free` says what memory is free, and `options` are of its
    `ExecutorSettings`.
    """
    settings = tiny_settings(**{"model": {"path": BASE}, **changes})
    return OperationExecutor(
        folder,
        settings,
        ExecutorSettings(
            checkpoints=root / "checkpoints", recovery=root / "recovery", scratch=root / "scratch", **options
        ),
        free,
    )


def floats(*values: float) -> Array:
    return Array.of(DType.FLOAT32, values)


def ints(*values: int, shape: tuple[int, ...] | None = None) -> Array:
    return Array.of(DType.INT64, values, shape)


def datum(tokens: Sequence[int], targets: Sequence[int] | Array | None = None, **inputs: Array) -> Datum:
    """Make a sequence. Without `targets` each token predicts the next, and the last predicts 0."""
    wanted = [*tokens[1:], 0] if targets is None else targets
    array = wanted if isinstance(wanted, Array) else ints(*wanted)
    return Datum(Array.of(DType.INT32, tokens).data, {"target_tokens": array, **inputs})


def random_data(seed: int, count: int, longest: int = 12) -> tuple[Datum, ...]:
    """Make sequences for cross-entropy with weights of both signs; some begin alike."""
    random = torch.Generator().manual_seed(seed)
    data = []
    for number in range(count):
        length = int(torch.randint(2, longest + 1, (), generator=random))
        tokens = torch.randint(1, 60, (length,), generator=random).tolist()
        if number % 3 == 1:
            tokens = [7, 8, 9, 10, *tokens]
        weights = torch.randn(len(tokens), generator=random).tolist()
        data.append(datum(tokens, weights=floats(*weights)))
    return tuple(data)


def forward_backward(*data: Datum, loss: LossSpec = CROSS_ENTROPY, forward_only: bool = False) -> ForwardBackward:
    return ForwardBackward(loss=loss, data=data, forward_only=forward_only)


def optim_step(reduction: Reduction = Reduction.SUM, **adam: float) -> OptimStep:
    return OptimStep(adam=msgspec.structs.replace(AdamParams(learning_rate=1e-2), **adam), reduction=reduction)


def created(made: OperationExecutor, model: str, spec: AdapterSpec | None = SPEC) -> ModelReady:
    found = made.execute(model, CreateModel(base=BASE, adapter=spec))
    assert isinstance(found, ModelReady), found
    return found


def scored(made: OperationExecutor, model: str, operation: ForwardBackward) -> Scores:
    found = made.execute(model, operation)
    assert isinstance(found, Scores), found
    return found


def stepped(made: OperationExecutor, model: str, operation: OptimStep) -> StepTaken:
    found = made.execute(model, operation)
    assert isinstance(found, StepTaken), found
    return found


def failed(made: OperationExecutor, model: str, operation: Operation) -> Failed:
    found = made.execute(model, operation)
    assert isinstance(found, Failed), found
    return found


def logprobs(scores: Scores) -> list[float]:
    """Return the logprobs of all data, one after the other."""
    return [value for output in scores.outputs for value in output["logprobs"].values()]
