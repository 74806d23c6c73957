"""The events of the log's maintenance: messages that could not be decided, full storage, compaction."""

from bombus.hive.events.common import Event


class MessageDeadLettered(Event, frozen=True, kw_only=True, omit_defaults=True, tag="message.set_aside"):
    """An inbox message could not be decided because of a bug in bombus, and was skipped."""

    message: str  # the kind of the message
    about: str  # the engine that the message concerns
    id: str
    why: str


class StorageFilled(Event, frozen=True, kw_only=True, omit_defaults=True, tag="storage.filled"):
    """`what`, a stream or the disk, has less free space than its reserve. New work is refused until `storage.freed`."""

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

    If there is an archive, the events were written to it first. If `below` is 0, nothing was removed: an earlier
    compaction failed, but the log has become short enough without one.
    """

    below: int


class CompactionFailed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="compaction.failed"):
    """The log is over 60 % full, but no events could be removed, for a reason `why` that the operator can fix."""

    why: str


class StreamWentBack(Event, frozen=True, kw_only=True, omit_defaults=True, tag="stream.went_back"):
    """The stream `what` has lost its end: it had messages up to `known`, but now only up to `kept`.

    The hive continues with the remaining messages. For `inbox`, the next message that the hive decides is the first one
    after `kept`. For `calls`, `needed` counts the lost calls whose episodes are open or still had to be trained on.
    """

    what: str
    known: int
    kept: int
    needed: int = 0


UpkeepEvent = MessageDeadLettered | StorageFilled | StorageFreed | LogCompacted | CompactionFailed | StreamWentBack
