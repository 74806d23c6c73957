"""What `bombus replay episode` takes from services where they are installed.

Each formula stays in its service. Like the table of commands in `bombus.cli`, this one names modules of services as
data; a Protocol says what each of them defines. Without a service, a view shows what it can and says what to install.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from bombus.cli import load
from bombus.config.job import RunConfig
from bombus.hive.events import BatchEpisode
from bombus.hive.records import CallRecord

TokenText = Callable[[int], str]


class TokenTextProvider(Protocol):
    def token_texts(self, files: Mapping[str, bytes]) -> TokenText:
        """Return a function from a token id to its text. Raises `EngineFault` for files that cannot be used."""
        ...


class AdvantageProvider(Protocol):
    def call_advantages(
        self, group: Sequence[tuple[BatchEpisode, Sequence[CallRecord]]], job: RunConfig
    ) -> list[list[float]]:
        """Return the advantage of each call of each episode of a group.

        Raises `ValueError` when an episode does not have one reward for each of its calls, or when the job's estimator
        needs more than the group.
        """
        ...


def token_text_provider() -> TokenTextProvider:
    """Raises `NotInstalled`."""
    module: TokenTextProvider = load("bombus_gateway.text.token_texts", extra="gateway")
    return module


def advantage_provider() -> AdvantageProvider:
    """Raises `NotInstalled`."""
    module: AdvantageProvider = load("bombus_trainer.replay.formulas", extra="trainer")
    return module
