"""The part of an engine's state that concerns rollout groups.

The queue has the waiting groups, and `batch` is the batch that was handed out last. The body of a group stays in the
stream `trajectories` for as long as the queue or the batch refers to it.
"""

from collections.abc import Iterable, Iterator
from itertools import takewhile

import msgspec

from bombus.hive import events as ev
from bombus.hive.records import digest
from bombus.hive.trajectories.queue import QueuedGroup, TrajectoryQueue

REPEAT_S = 60.0  # a push with the same key within this time is a repetition
HANDED_S = 600.0  # after this time, an undelivered batch is no longer expected to be read


class HandedOut(msgspec.Struct, kw_only=True):
    """A batch that was handed out. It is served again until it has been delivered and the next batch is requested.

    `numbers` are the numbers of its groups, and `combined` says which of them stay together.
    """

    run: int
    number: int
    groups: list[QueuedGroup]
    handed_ns: int
    delivered: bool = False
    numbers: tuple[int, ...] = ()
    combined: dict[int, tuple[int, ...]] = {}

    @property
    def sequences(self) -> int:
        return sum(group.sequences for group in self.groups)


class RecentPush(msgspec.Struct, frozen=True, array_like=True):
    """A push that might be repeated: when it was decided, its answer, and the digest of its groups (see
    `digest_of`)."""

    at_ns: int
    held: tuple[int | None, ...]
    digest: bytes = b""


def digest_of(groups: Iterable[QueuedGroup]) -> bytes:
    """Return a digest that identifies the groups of a push: the digest of their bodies' digests."""
    return digest(b"".join(group.body.digest for group in groups if group.body is not None))


class Trajectories(msgspec.Struct, kw_only=True):
    trainer: ev.TrainerRegistered | None = None  # the trainer of the current run
    begun: bool = False  # whether the trainer has requested a batch
    queue: TrajectoryQueue = msgspec.field(default_factory=TrajectoryQueue)
    batch: HandedOut | None = None
    batches: int = 0  # number handed out in this run
    withdrawn: int = 0  # how many of those batches were withdrawn because a group was lost
    before: int = 0  # the number of the batch that was delivered before `batch`
    given_up: int = 0  # number of groups dropped in this run, see `GroupsGivenUp`
    given_up_why: str = ""  # why the last such group was dropped
    latest: QueuedGroup | None = None  # the group that was pushed last
    pushes: dict[str, RecentPush] = {}  # keyed by the push's key, oldest first
    heard_ns: dict[int, int] = {}  # when each connected environment joined or last pushed
    silent_ns: dict[int, int] = {}  # when environments left by falling silent
    queued_at: dict[int, int] = {}  # version at which each queued group made from episodes was queued, oldest first
    grouped: int = 0  # number of episodes of this run that became groups
    grouped_sequences: int = 0  # number of sequences in these groups

    @property
    def current_step(self) -> int:
        """Return the trainer's step: each batch that was handed out and not withdrawn counts as a step."""
        return (0 if self.trainer is None else self.trainer.starting_step) + self.batches - self.withdrawn

    def repeated(self, key: str, now_ns: int) -> RecentPush | None:
        """Return the push with this key from the last `REPEAT_S` seconds, if any."""
        before = self.pushes.get(key) if key else None
        return before if before is not None and now_ns - before.at_ns <= REPEAT_S * 1e9 else None

    def needed(self) -> Iterator[QueuedGroup]:
        """Yield the groups that are queued or in the batch that was handed out last. `latest` is not included."""
        yield from self.queue.groups.values()
        if self.batch is not None:
            yield from self.batch.groups

    def queued_before(self, version: int) -> list[int]:
        """Return the numbers of the groups made from episodes that entered the queue at an older policy version than
        this one."""
        return [number for number, _ in takewhile(lambda queued: queued[1] < version, self.queued_at.items())]

    def movable(self, now_ns: int) -> Iterator[tuple[int, QueuedGroup]]:
        """Yield, by number, the groups whose bodies can be moved to a later place in the stream.

        A batch's groups can be moved once the batch has been delivered, or if it was handed out long ago: then its
        trainer is gone, or has received the batch without reporting it yet.
        """
        yield from self.queue.groups.items()
        batch = self.batch
        if batch is not None and (batch.delivered or now_ns - batch.handed_ns >= HANDED_S * 1e9):
            yield from zip(batch.numbers, batch.groups, strict=False)
