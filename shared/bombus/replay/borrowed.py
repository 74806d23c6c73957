"""What replay takes from services, by name, where they are installed: shared imports no service.

Each formula stays in one place. Without its service a view shows what it can do without, and says what to install.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bombus.errors import BombusError
from bombus.run_config import RunConfig


class NotInstalled(BombusError):
    """What a view would need is not installed; the sentence says how to get it."""


class Tokenizer(Protocol):
    """`bombus_gateway.tokenizer.Tokenizer`: what each token adds to the text, and the names of special ones."""

    pieces: list[bytes]
    specials: dict[int, str]


def tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """Raises `NotInstalled`, `EngineFault` for files that cannot be used."""
    made: Tokenizer = _from("bombus_gateway.tokenizer", "gateway").Tokenizer(files)
    return made


def call_advantages(
    rewards: Sequence[float],
    call_rewards: Sequence[Sequence[float] | None],
    lengths: Sequence[Sequence[int]],
    job: RunConfig,
) -> list[list[float]]:
    """The trainer's advantage of each call of each episode of a group, as the job asks for it.

    Raises `NotInstalled`, `ValueError` when an episode has not one reward for each of its calls.
    """
    settings = _from("bombus_trainer.settings", "trainer").TrainerSettings.of_job(job)
    formula = _from("bombus_trainer.advantages", "trainer").call_advantages
    found: list[list[float]] = formula(rewards, call_rewards, lengths, settings.estimator, settings.normalise_std)
    return found


def _from(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise NotInstalled(f"{error.name} is not installed: pip install 'bombus[{extra}]'") from error
