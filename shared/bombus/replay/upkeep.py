"""Checks a log, and removes its oldest events, for `bombus log check` and `bombus log compact`."""

from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from bombus.bus import EPOCH, INBOX, BlobMissing, Bus, Stored, snapshots
from bombus.bus.follow import read_event
from bombus.bus.large.parts import Parts
from bombus.bus.snapshots import KEPT, Snapshot
from bombus.errors import Code, LogCorrupted, Refused
from bombus.hive import events as ev
from bombus.hive.fold.evolve import evolve
from bombus.hive.levels import check_level
from bombus.hive.operations import order as operations
from bombus.hive.state import FOLD, EngineState, Hive
from bombus.hive.trajectories import order as rollout_groups
from bombus.replay.export import calls_held_by
from bombus.replay.source import RECORDS_AT_ONCE, BusSource, ReadProgress, Source

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class Checked(msgspec.Struct, frozen=True):
    """The result of folding events `first` to `last`, after which the log is at feature level `level`.

    `agreed` contains the positions of snapshots that agree with the fold. `other_fold` contains the positions of
    snapshots that were not compared because another version made them. `bodies` counts bodies and results of
    operations, and `groups` counts rollout groups; `lost` describes the groups that are gone.
    """

    first: int
    last: int
    epochs: int
    level: int
    calls: int
    agreed: tuple[int, ...] = ()
    other_fold: tuple[int, ...] = ()
    bodies: int = 0
    groups: int = 0
    lost: tuple[str, ...] = ()


async def check(source: Source, progress: ReadProgress = lambda position, end: None) -> Checked:
    """Fold a log from its first event, and read the calls that are still needed. Of a hive, also compare each snapshot
    on the way, and read bodies, results and rollout groups.

    Raises `LogCorrupted` at the first fault: an event that cannot be read, a gap, an epoch that goes backwards, an
    inbox position that goes backwards without a `stream.went_back` event, an inbox without the message that the last
    event answers, an operation or a batch out of order, a multi-model episode of which only a part begins or ends, a
    snapshot that cannot be read or is not the fold of the events before it, or a call, or an operation's body or
    result, that is still needed but does not match its reference. Rollout groups that are gone are not a fault of the
    log: they are only counted. Raises `NewerLevel` if only newer versions may take part in the hive, and `NotOnLog` if
    the log was compacted during the check.
    """
    bus = source.bus if isinstance(source, BusSource) else None
    waiting: dict[int, Snapshot] = {}
    if bus is not None:
        kept = await _kept_snapshots(bus, await source.begins_at())
        fold = LogCheck(await snapshots.start_of(bus, from_first=True))
        waiting = {each.position: each for each in kept if each.position > fold.position}
    else:
        hive, position = await source.base()
        fold = LogCheck(Snapshot(fold=FOLD, position=position, event_id="", answered=0, hive=hive))
    check_level(fold.hive.level)
    first, end, newest = fold.position + 1, (await source.end()).seq, None
    agreed: list[int] = []
    other: list[int] = []
    async with aclosing(source.in_order(fold.position, end)) as messages:
        async for newest in messages:
            fold.take(newest)
            if (snapshot := waiting.get(newest.seq)) is not None:
                fold.compare(snapshot)
                (agreed if snapshot.fold == FOLD else other).append(newest.seq)
            progress(fold.position, end)
    fold.check_multi_model()
    refs = sorted(set(calls_held_by(fold.hive)), key=lambda ref: ref.seq)
    if bus is None:  # it may have been exported without calls
        refs = [ref for ref, body in zip(refs, await source.bodies(refs)) if body is not None]
    for begin in range(0, len(refs), RECORDS_AT_ONCE):
        await source.records(refs[begin : begin + RECORDS_AT_ONCE])
    checked = Checked(first, end, fold.epochs, fold.hive.level, len(refs), tuple(agreed), tuple(other))
    if bus is None:
        return checked
    await _check_inbox(bus, newest)
    bodies = await _read_bodies(bus, fold.hive)
    groups, lost = await _look_for_groups(bus, fold.hive)
    return msgspec.structs.replace(checked, bodies=bodies, groups=groups, lost=lost)


async def _check_inbox(bus: Bus, newest: Stored | None) -> None:
    """Raise `LogCorrupted` if the inbox no longer has the message that the log's last event answers."""
    if newest is None or not newest.answers.digest:
        return
    if not await bus.is_kept(bus.subjects.inbox_stream, newest.answers):
        raise LogCorrupted(
            f"event {newest.seq} answers message {newest.answers.seq} of the inbox, which is gone or was replaced by "
            "another: the inbox has lost its end. The next coordinator that leads continues after the messages that "
            "are left, and records this in the log (`stream.went_back`)"
        )


async def _read_bodies(bus: Bus, hive: Hive) -> int:
    """Read the bodies and results of operations that may still be needed, and return how many there are. Raises
    `LogCorrupted` if one is missing or damaged."""
    parts, count = Parts(bus), 0
    for engine in hive.engines.values():
        for model in engine.clients.models.values():
            for ref in model.needed():
                await parts.fetch(ref)
                count += 1
    return count


async def _look_for_groups(bus: Bus, hive: Hive) -> tuple[int, tuple[str, ...]]:
    """Return how many rollout groups may still be needed, and a description of each lost group.

    The bodies of batches are read. For queued groups, which may be very numerous, only the positions are checked.
    """
    stream = bus.subjects.trajectories_stream
    needed = [(name, body) for name, _, body in hive.bodies_needed()]
    if not needed:
        return 0, ()
    state, parts = await bus.state(stream), Parts(bus, stream)
    lost: dict[tuple[str, int], str] = {}
    for name, body in needed:
        if body.first < state.first_seq or max(body.seqs) > state.last_seq:
            lost[name, body.first] = f"engine {name}: the body at {body.first} of {stream} is gone"
    for engine in hive.engines.values():
        batch = engine.trajectories.batch
        for group in [] if batch is None or batch.delivered else batch.groups:
            if group.body is None or (engine.name, group.body.first) in lost:
                continue
            try:
                await parts.fetch(group.body)
            except LogCorrupted as error:
                lost[engine.name, group.body.first] = f"engine {engine.name}: {error}"
    return len(set(needed)), tuple(lost.values())


async def _kept_snapshots(bus: Bus, begins_at: int) -> list[Snapshot]:
    """Load the snapshots of a log that begins at `begins_at`, except any that a leader removes in the meantime."""
    kept: list[Snapshot] = []
    for position in await snapshots.positions(bus):
        try:
            if position >= begins_at - 1:
                kept.append(await load_snapshot(bus, position))
        except BlobMissing:
            continue
    return kept


class _Wholes:
    """Finds multi-model episodes that a single decision claimed, ended or aborted only in part."""

    def __init__(self) -> None:
        self._done: set[tuple[str, str]] = set()  # pairs of what happened to an episode, and the episode's name
        self._owed: set[tuple[str, str]] = set()  # such pairs for the partners, required in the same decision

    def note(self, hive: Hive, event: ev.Event) -> None:
        """Note an event that is about to be folded."""
        match event:
            case ev.EpisodeClaimed():
                self._done.update(("claimed", name) for name in event.episodes)
                self._owed.update(("claimed", name) for names in event.partners.values() for name in names)
            case ev.EpisodeEnded():
                self._close(hive.engine(event.engine), "ended", [outcome.episode for outcome in event.outcomes])
            case ev.EpisodeAborted():
                self._close(hive.engine(event.engine), "aborted", event.episodes)

    def _close(self, engine: EngineState, how: str, names: Sequence[str]) -> None:
        for episode in (engine.open[name] for name in names if name in engine.open):
            self._done.add((how, episode.id))
            self._owed.update((how, partner) for partner in episode.partners.values())

    def why_not(self) -> str:
        """Return what is missing from the events added since this was last called, or "" if nothing is. Call this only
        between decisions."""
        lacking = sorted(self._owed - self._done)
        self._done.clear()
        self._owed.clear()
        return f"{lacking[0][1]} was not {lacking[0][0]} with the rest of its multi-model episode" if lacking else ""


class LogCheck:
    """Folds a log from `start` on, and checks each event against the one before it."""

    def __init__(self, start: Snapshot) -> None:
        self.hive: Hive = start.hive
        self.position = start.position
        self.epochs = 0
        self._epoch = start.hive.epoch
        self._answered = start.answered
        self._wholes = _Wholes()

    def take(self, stored: Stored) -> None:
        """Fold the next event. Raises `LogCorrupted` if it is out of sequence, or if no leader could have written
        it."""
        if stored.seq != self.position + 1:
            raise LogCorrupted(f"event {self.position + 1} is missing: the next one is {stored.seq}")
        event = read_event(stored)
        try:
            epoch, answered = int(stored.headers[EPOCH]), int(stored.headers[INBOX])
        except (KeyError, ValueError) as error:
            raise LogCorrupted(f"event {stored.seq} does not say its epoch and what it answers ({error!r})") from error
        if answered != self._answered:
            self.check_multi_model()
        if why := operations.why_out_of_order(self.hive, event) or rollout_groups.why_out_of_order(self.hive, event):
            raise LogCorrupted(f"event {stored.seq} is impossible: {why}")
        self._wholes.note(self.hive, event)
        evolve(self.hive, event)
        self.position = stored.seq
        if epoch < self._epoch or epoch != self.hive.epoch:
            raise LogCorrupted(f"event {stored.seq} is of epoch {epoch}, inside epoch {self.hive.epoch}")
        if answered < self._answered and not isinstance(event, ev.StreamWentBack):
            raise LogCorrupted(f"event {stored.seq} answers inbox message {answered}, after {self._answered}")
        self.epochs += epoch > self._epoch
        self._epoch, self._answered = epoch, answered

    def check_multi_model(self) -> None:
        """Raise `LogCorrupted` if the events so far claim, end or abort only a part of a multi-model episode."""
        if why := self._wholes.why_not():
            raise LogCorrupted(f"up to event {self.position}, {why}")

    def compare(self, snapshot: Snapshot) -> None:
        """Raise `LogCorrupted` if this version made the snapshot, but the fold up to here differs from it."""
        if snapshot.fold == FOLD and not _same(snapshot.hive, self.hive):
            raise LogCorrupted(f"the snapshot at event {self.position} is not the fold of the log up to there")


def _same(one: Hive, other: Hive) -> bool:
    """Return whether two states are equal. NaN equals NaN here, because a step may have NaN as a metric."""
    return one == other or _encode(one) == _encode(other)


async def load_snapshot(bus: Bus, position: int) -> Snapshot:
    """Load a snapshot. Raises `LogCorrupted`, with the snapshot's position, if the snapshot is damaged, or
    `BlobMissing` if it no longer exists."""
    try:
        return await snapshots.load(bus, position)
    except BlobMissing:
        raise
    except LogCorrupted as error:
        raise LogCorrupted(f"the snapshot at event {position}: {error}") from error


async def compact(bus: Bus) -> int:
    """Remove the events before the older of the two newest snapshots, and return how many were removed.

    The remaining events can be verified from that snapshot, even if the newer one is lost. Raises `Refused` if this
    version has not written two snapshots yet, and `LogCorrupted` if one of them is damaged.
    """
    found = (await snapshots.positions(bus))[-KEPT:]
    if len(found) < KEPT:
        raise Refused(
            Code.NO_SNAPSHOT,
            f"nothing was removed: only {len(found)} of {KEPT} snapshots exist. A coordinator writes one when it "
            "shuts down cleanly, and after every 20,000 events",
        )
    for position in found:
        if (await load_snapshot(bus, position)).fold != FOLD:
            raise Refused(
                Code.NO_SNAPSHOT,
                f"another version wrote the snapshot at event {position}: compact once this version has written two",
            )
    return await bus.purge_below(bus.subjects.events_stream, found[0])
