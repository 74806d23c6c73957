"""What replay takes from services, by name, where they are installed: shared imports no service.

Each formula stays in one place. Without its service a view shows what it can do without, and says what to install.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bombus.config.job import RunConfig
from bombus.errors import BombusError
from bombus.hive.events import BatchEpisode
from bombus.hive.records import CallRecord


class NotInstalled(BombusError):
    """What a view would need is not installed; the sentence says how to get it."""


class Tokenizer(Protocol):
    """`bombus_gateway.text.tokenizer.Tokenizer`: what each token adds to the text, and the names of special ones."""

    pieces: list[bytes]
    specials: dict[int, str]


def tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """Raises `NotInstalled`, `EngineFault` for files that cannot be used."""
    made: Tokenizer = _from("bombus_gateway.text.tokenizer", "gateway").Tokenizer(files)
    return made


def call_advantages(group: Sequence[tuple[BatchEpisode, Sequence[CallRecord]]], job: RunConfig) -> list[list[float]]:
    """The trainer's advantage of each call of each episode of a group, as the job asks for it.

    Raises `NotInstalled`, `ValueError` when an episode has not one reward for each of its calls, or the group alone
    does not say.
    """
    settings = _from("bombus_trainer.settings", "trainer").TrainerSettings.of_job(job)
    if settings.estimator.over_batch:
        raise ValueError(f"{settings.estimator} normalises over the whole batch: see `bombus replay batch`")
    batch = _from("bombus_trainer.data.batch", "trainer")
    episodes = [
        batch.EpisodeCalls(member.episode, member.reward, tuple(records), member.call_rewards)
        for member, records in group
    ]
    found: list[list[float]] = batch.episode_advantages(episodes, settings)
    return found


def _from(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise NotInstalled(f"{error.name} is not installed: pip install 'bombus[{extra}]'") from error
