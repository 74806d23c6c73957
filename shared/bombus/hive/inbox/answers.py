"""The answers to commands."""

import msgspec

from bombus.errors import Code
from bombus.hive.events import NotedCall


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """The answer to a command. A reader that has folded the log up to event `position` has the state it describes."""

    position: int = 0


class Done(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="done"):
    run: int = 0
    epoch: int = 0  # the trainer's, in the answer to `trainer.opens`
    doing: str = ""  # what a trainer works on, in its answer to who asks whether it lives


class Granted(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="granted"):
    run: int
    episodes: tuple[str, ...]
    claimed_ns: int
    discard_timeout_s: float
    version: int


class EngineGrant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of one engine in the grant of a multi-model claim."""

    engine: str
    run: int
    episodes: tuple[str, ...]
    version: int


class MultiModelGranted(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="granted_joint"):
    """The grant of a multi-model claim: multi-model episode n consists of the n-th episode of each engine."""

    grants: tuple[EngineGrant, ...]
    claimed_ns: int
    discard_timeout_s: float


class Found(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="found"):
    run: int
    open: bool
    calls: tuple[NotedCall, ...] = ()


class Accepted(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="accepted"):
    """An operation waits or was executed: `operation` is its id, and it is the `number`th of its model."""

    run: int
    operation: str
    number: int


class Joined(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="joined"):
    """An environment has joined. Without a number it has to ask again: no trainer has asked for a batch yet."""

    environment: int | None = None


class Pushed(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="pushed"):
    """For each group the sequences that its environment holds after it, None where the group is queued."""

    held: tuple[int | None, ...]


class BatchTaken(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="batch.taken"):
    """The number of the batch that was handed out, 0 for none. The state at `position` has its groups.

    `again`: it was handed out before, and is not known to have arrived.
    """

    run: int
    number: int = 0
    again: bool = False


class Refusal(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="refusal"):
    code: Code
    why: str


AnyAnswer = Done | Granted | MultiModelGranted | Found | Accepted | Joined | Pushed | BatchTaken | Refusal
