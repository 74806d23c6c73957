"""The answers to commands."""

import msgspec

from bombus.errors import Code
from bombus.hive.events import NotedCall


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """The answer to a command. It refers to the hive's state as of event `position` of the log."""

    position: int = 0


class Done(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="done"):
    run: int = 0
    epoch: int = 0  # the trainer's epoch, in the answer to `trainer.opens`
    doing: str = ""  # a trainer's current work, in its answer to a request on `Subjects.trainer`


class Granted(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="granted"):
    run: int
    episodes: tuple[str, ...]
    claimed_ns: int
    discard_timeout_s: float
    version: int


class EngineGrant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine's part in the grant of a multi-model claim."""

    engine: str
    run: int
    episodes: tuple[str, ...]
    version: int


class MultiModelGranted(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="granted_joint"):
    """The grant of a multi-model claim. Multi-model episode n consists of the n-th episode of each engine."""

    grants: tuple[EngineGrant, ...]
    claimed_ns: int
    discard_timeout_s: float


class Found(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="found"):
    run: int
    open: bool
    calls: tuple[NotedCall, ...] = ()


class Accepted(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="accepted"):
    """An operation was accepted. `operation` is its id, and `number` its number among its model's operations."""

    run: int
    operation: str
    number: int


class Joined(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="joined"):
    """The answer to an environment that asked to join. If `environment` is None, it has not joined and must retry,
    because no trainer has requested a batch yet."""

    environment: int | None = None


class Pushed(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="pushed"):
    """Groups were queued. For each group, `held` gives the number of sequences that its environment is holding, or None
    if the group went straight into the queue."""

    held: tuple[int | None, ...]


class BatchTaken(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="batch.taken"):
    """The number of the batch that was handed out, or 0 if there was none. The state at `position` contains the batch's
    groups.

    `again` means that the batch was handed out before, but is not known to have arrived.
    """

    run: int
    number: int = 0
    again: bool = False


class Refusal(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="refusal"):
    code: Code
    why: str


AnyAnswer = Done | Granted | MultiModelGranted | Found | Accepted | Joined | Pushed | BatchTaken | Refusal
