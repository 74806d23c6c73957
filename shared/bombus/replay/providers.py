"""The functions of services that `bombus replay episode` uses. Services register them as entry points in
pyproject.toml.

Each formula stays in its service, and `shared/` imports no module of a service. If a service is not installed, a view
shows what it can and says what to install.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from bombus.cli import NotInstalled
from bombus.config.job import RunConfig
from bombus.hive.events import BatchEpisode
from bombus.hive.records import CallRecord

GROUP = "bombus.replay"


class TokenText(Protocol):
    """The texts of a tokenizer's tokens."""

    def __call__(self, token: int, /) -> str:
        """Return the text of one token."""
        ...

    def marked_up(self, tokens: Sequence[int], /) -> str:
        """Return the text of a sequence of tokens, with special tokens marked so that they differ from ordinary text
        with the same characters."""
        ...


class TokenTexts(Protocol):
    """Entry point `token_texts`, registered by the gateway."""

    def __call__(self, files: Mapping[str, bytes]) -> TokenText:
        """Load a tokenizer from its files. Raises `EngineFault` if they cannot be used."""
        ...


class CallAdvantages(Protocol):
    """Entry point `call_advantages`, registered by the trainer."""

    def __call__(self, group: Sequence[tuple[BatchEpisode, Sequence[CallRecord]]], job: RunConfig) -> list[list[float]]:
        """Return the advantage of each call, for each episode of a group.

        Raises `ValueError` if an episode does not have one reward for each of its calls, or if the job's estimator
        needs data from outside the group.
        """
        ...


def token_texts() -> TokenTexts:
    """Return the gateway's function that loads a tokenizer. Raises `NotInstalled` if the gateway is missing."""
    found: TokenTexts = registered("token_texts", extra="gateway")
    return found


def call_advantages() -> CallAdvantages:
    """Return the trainer's function that computes advantages. Raises `NotInstalled` if the trainer is missing."""
    found: CallAdvantages = registered("call_advantages", extra="trainer")
    return found


def registered(name: str, extra: str) -> Any:
    """Return the object that a service registered under a name. Raises `NotInstalled`, which names the extra to
    install."""
    for entry in entry_points(group=GROUP, name=name):
        try:
            return entry.load()
        except ModuleNotFoundError as error:
            raise NotInstalled(error.name or name, extra) from error
    raise NotInstalled(f"the entry point {GROUP}:{name}", extra)
