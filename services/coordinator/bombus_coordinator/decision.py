"""What deciding one inbox message gives."""

from collections.abc import Iterator

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.events import Event
from bombus.hive.inbox import Answer, Refusal


class Reply(msgspec.Struct, frozen=True):
    """An answer for whoever sent the command with this message id."""

    command: str
    answer: Answer


class Decision(msgspec.Struct, frozen=True):
    """Events that stand or fall together, and the replies that may go out once they are on the log."""

    events: tuple[Event, ...] = ()
    replies: tuple[Reply, ...] = ()


Decisions = Iterator[Decision]


def refusal(error: Refused) -> Refusal:
    return Refusal(code=error.code, why=error.why)


def wrong_phase(doing: str, phase: str, advice: str) -> Refused:
    return Refused(Code.WRONG_PHASE, f"Cannot {doing}: the engine's status is {phase}. {advice}")
