"""The result of deciding one inbox message."""

from collections.abc import Iterator

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.events import Event
from bombus.hive.inbox import Answer, Refusal

NAMES_PER_EVENT = 5_000  # maximum number of episodes that one event names, about 100 KB


class CommandReply(msgspec.Struct, frozen=True):
    """The answer to the command with this message id."""

    command: str
    answer: Answer


class Decision(msgspec.Struct, frozen=True):
    """Events that are stored all or nothing, and the replies to send once the events are on the log."""

    events: tuple[Event, ...] = ()
    replies: tuple[CommandReply, ...] = ()


Decisions = Iterator[Decision]


def refusal(error: Refused) -> Refusal:
    return Refusal(code=error.code, why=error.why)


def wrong_phase(doing: str, phase: str, advice: str) -> Refused:
    return Refused(Code.WRONG_PHASE, f"Cannot {doing}: the engine's status is {phase}. {advice}")
