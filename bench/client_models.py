"""What operations of training cost: one call of the executor, and data packed beside one sequence for each operation.

    python -m bench.client_models                          a tiny model
    python -m bench.client_models --smollm2 FOLDER         a real one (any Hugging Face folder)

Figures are of CPU seconds: on a machine that others use too they repeat, wall time does not.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np
import torch

from bombus.config.job import validated
from bombus.operations import (
    AbortEpoch,
    AdamParams,
    AdapterSpec,
    Array,
    CreateModel,
    Datum,
    DType,
    Failed,
    ForwardBackward,
    LossSpec,
    Operation,
    OptimStep,
    Reduction,
)
from bombus.weights.models import build_tiny
from bombus_trainer.operations.executor import OperationExecutor
from bombus_trainer.operations.settings import ExecutorSettings
from bombus_trainer.settings import TrainerSettings

STEP = OptimStep(adam=AdamParams(learning_rate=1e-4), reduction=Reduction.TOKEN_MEAN)
SHORT, LONG = (16, 64), (128, 512)  # how many tokens sequences have


def executor(folder: Path, root: Path) -> OperationExecutor:
    job = validated({"model": {"path": str(folder)}}, {})
    options = ExecutorSettings(checkpoints=root / "checkpoints", recovery=root / "recovery", scratch=root / "scratch")
    made = OperationExecutor(folder, TrainerSettings.of_job(job), options)
    run(made, CreateModel(base=str(folder), adapter=AdapterSpec(rank=8, alpha=32.0)))
    return made


def run(made: OperationExecutor, operation: Operation) -> None:
    if isinstance(found := made.execute("m", operation), Failed):
        raise SystemExit(found.error)


def data_of(count: int, lengths: tuple[int, int], prompt: int = 0) -> list[Datum]:
    """Make sequences for cross-entropy; every eight begin with the same `prompt` tokens."""
    random = np.random.default_rng(0)
    data: list[Datum] = []
    for number in range(count):
        if number % 8 == 0:
            shared = random.integers(4, 40, prompt)
        tokens = np.append(shared, random.integers(4, 40, random.integers(*lengths))).astype(np.int32)
        targets = Array.of(DType.INT64, np.roll(tokens, -1).tolist())
        data.append(Datum(tokens.tobytes(), {"target_tokens": targets}))
    return data


def cost(work: Callable[[], object], times: int) -> float:
    """Return the CPU seconds of one call, the first of which is not counted."""
    work()
    began = process_time()
    for _ in range(times):
        work()
    return (process_time() - began) / times


def forward_backward(made: OperationExecutor, batches: Sequence[Sequence[Datum]]) -> None:
    for batch in batches:
        run(made, ForwardBackward(loss=LossSpec("cross_entropy"), data=tuple(batch)))
    run(made, AbortEpoch())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER", help="a model's folder, instead of the tiny one")
    parser.add_argument("--times", type=int, default=3, help="how often each batch is computed (default 3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        folder = arguments.smollm2
        if folder is None:
            folder = root / "tiny"
            build_tiny(folder)
        made = executor(folder, root)
        nothing = ForwardBackward(loss=LossSpec("cross_entropy"), data=())
        for name, operation in (("forward_backward of no data", nothing), ("optim_step without a gradient", STEP)):
            each = cost(partial(run, made, operation), 200)
            print(f"{name}: {1e6 * each:.0f} us, {1 / each:,.0f} a second")
        for title, data in (
            (f"64 sequences of {SHORT[0]} to {SHORT[1]} tokens", data_of(64, SHORT)),
            (f"16 sequences of {LONG[0]} to {LONG[1]} tokens", data_of(16, LONG)),
            (f"64 sequences of {SHORT[0]} to {SHORT[1]} tokens after 200 that eight share", data_of(64, SHORT, 200)),
        ):
            tokens = sum(len(datum.tokens) // 4 for datum in data)
            packed = cost(partial(forward_backward, made, [data]), arguments.times)
            alone = cost(partial(forward_backward, made, [[one] for one in data]), arguments.times)
            print(
                f"{title}: {tokens / packed:,.0f} tokens a CPU second in one operation, {tokens / alone:,.0f} in one "
                f"operation each: {alone / packed:.2f} times"
            )


if __name__ == "__main__":
    main()
