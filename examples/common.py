"""Helpers for the examples: their flags, a job for a model that fits a laptop, and their errors."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from bombus import Job
from bombus.errors import BombusError

TINY = {"lr": 3e-3}
LORA = {"lr": 1e-4, "lora_rank": 16, "lora_alpha": 32}


def arguments(about: str, model: str = "tiny") -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--url", default="http://127.0.0.1:10086", help="of a hive; start one with `bombus up`")
    parser.add_argument("--model", default=model, help="tiny, smollm2 or a folder (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to train for (default: %(default)s)")
    return parser.parse_args()


def job(model: str, batch_size: int = 4, num_repeat: int = 8, tools: str = "template") -> Job:
    """Return a job in which `batch_size` tasks with `num_repeat` episodes each make one optimizer step.

    With `tools="hermes"`, tools are described in messages: the template of smollm2, for one, has no place for them.
    """
    tuning = TINY if model == "tiny" else LORA
    name = f"{Path(sys.argv[0]).stem}-{model}"  # run again, an example goes on where it was stopped
    return Job(
        model=model,
        experiment_name=name,
        batch_size=batch_size,
        num_repeat=num_repeat,
        max_model_len=2048,
        bombus={"model": {"tools": tools}},
        **tuning,
    )


def run(main: Callable[[], None]) -> None:
    """Run `main`. Refusals by the hive are printed without a traceback, since they say what to do."""
    refused: list[str] = []
    try:
        main()
    except* BombusError as group:  # of several engines that are started together, each may be refused
        refused = [f"{sys.argv[0]}: {error}" for error in group.exceptions]
    if refused:
        sys.exit("\n".join(refused))
