"""Seconds of a step: our torch backend against verl's FSDP engine (world size 1), on the same batches in one run.

Run by the Python that `bombus install verl` makes: `-m bench.verl [--model tiny smollm2] [--steps N]`.
"""

import argparse
from time import perf_counter

import torch
from tests.trainer.small_batches import call, episode

from bombus.config.job import validated
from bombus.weights.models import resolve_model
from bombus_trainer.backend import TrainerBackend
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.backends.verl.executor import VerlExecutor
from bombus_trainer.data.batch import EpisodeGroup
from bombus_trainer.machine import this_machine
from bombus_trainer.ranks import Ranks
from bombus_trainer.settings import TrainerSettings

SHAPES = {"tiny": (8, 16, 48, 32), "smollm2": (2, 8, 56, 8)}  # groups, episodes of each, prompt and reply tokens


def batch(model: str, vocab_size: int, step: int) -> list[EpisodeGroup]:
    groups, members, prompt, reply = SHAPES[model]
    random = torch.Generator().manual_seed(step)

    def draw(count: int) -> list[int]:
        return torch.randint(4, vocab_size, (count,), generator=random).tolist()

    made = []
    for g in range(groups):
        asked = draw(prompt)
        names = [f"e{g}-{i}" for i in range(members)]
        calls = {name: call(name, asked, draw(reply), logprob=-5.0, episode=name) for name in names}
        made.append(
            EpisodeGroup(f"t{g}", tuple(episode(name, float(i % 2), calls[name]) for i, name in enumerate(names)))
        )
    return made


def measure(backend: TrainerBackend, model: str, steps: int) -> tuple[float, list[tuple[float, float]]]:
    """Return seconds per step after the first, and loss and gradient norm of each step."""
    found, seconds = [], []
    for step in range(1, steps + 1):
        groups = batch(model, backend.vocab_size, step)
        start = perf_counter()
        metrics = backend.train_step(groups, step)
        seconds.append(perf_counter() - start)
        found.append((metrics["loss"], metrics["grad_norm"]))
    return min(seconds[1:] or seconds), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=["tiny"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(this_machine("cpu"))
    for model in arguments.model:
        folder = resolve_model(model, dtype="float32")
        settings = TrainerSettings(job=validated({"trainer": {"lr": 1e-5}}, {}))
        ours, ours_found = measure(Executor(folder, settings), model, arguments.steps)
        verl, verl_found = measure(VerlExecutor(folder, settings, Ranks.alone()), model, arguments.steps)
        groups, members, prompt, reply = SHAPES[model]
        print(f"{model}: {groups} x {members} episodes of {prompt} + {reply} tokens, fp32")
        print(f"  torch backend {ours:.2f} s a step, verl's engine {verl:.2f} s ({verl / ours:.1f} x)")
        for step, (left, right) in enumerate(zip(ours_found, verl_found, strict=True), 1):
            print(f"  step {step}: loss {left[0]:.6f} and {right[0]:.6f}, norm {left[1]:.5f} and {right[1]:.5f}")


if __name__ == "__main__":
    main()
