"""The events of the log's own upkeep: messages that could not be decided, full storage, compaction."""

from bombus.hive.events.common import Event


class MessageDeadLettered(Event, frozen=True, kw_only=True, omit_defaults=True, tag="message.set_aside"):
    """An inbox message could not be decided, because of a bug in bombus, and the next one was read."""

    message: str  # its kind
    about: str  # the engine that it is about
    id: str
    why: str


class StorageFilled(Event, frozen=True, kw_only=True, omit_defaults=True, tag="storage.filled"):
    """Less than the reserve of `what`, a stream or the disk, is left: new work is refused until `storage.freed`."""

    what: str
    used: int
    size: int
    why: str


class StorageFreed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="storage.freed"):
    what: str
    used: int
    size: int


class LogCompacted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="log.compacted"):
    """The events before `below` were removed; two verified snapshots replace them.

    With an archive, they were written to it first. 0: nothing had to be removed any more.
    """

    below: int


class CompactionFailed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="compaction.failed"):
    """The log is over 60 % full, and nothing could be removed from it, for a reason that its operator can fix."""

    why: str


class StreamWentBack(Event, frozen=True, kw_only=True, omit_defaults=True, tag="stream.went_back"):
    """The stream `what` has lost its end: it had message `known`, and has kept those up to `kept`.

    The hive continues with what is there. Of `inbox`, whatever came after `kept` is decided from here on. Of `calls`,
    `needed` of the lost ones belong to episodes that are open or were still to be trained.
    """

    what: str
    known: int
    kept: int
    needed: int = 0


UpkeepEvent = MessageDeadLettered | StorageFilled | StorageFreed | LogCompacted | CompactionFailed | StreamWentBack
