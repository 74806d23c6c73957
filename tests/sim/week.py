"""A week of a busy hive in virtual time: `python -m tests.sim.week --days 7 --rate 100`.

The coordinator's core, the fold, its snapshots, the compaction of the log and the retention of calls are those of
production; streams are in memory and count bytes as nats-server does. There are none of the faults of `tests.sim`
here, but 60 million calls. It prints a line for each hour, and fails as soon as anything is beyond its bound.
"""

import argparse
import asyncio
import heapq
import itertools
import random
import resource
import time
from array import array
from collections.abc import Iterator
from typing import cast

import msgspec

from bombus.bus import EPOCH, INBOX, Bus, Stored, StreamState, snapshots
from bombus.bus.headers import EXPECTED_LAST, MSG_ID, header_bytes
from bombus.bus.snapshots import Snapshot
from bombus.figures import byte_size
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, NotedCall, Weights
from bombus.hive.inbox import EpisodeResult
from bombus.hive.records import CallRef
from bombus.hive.state import FOLD, Hive
from bombus.hive.subjects import Subjects
from bombus.replay.upkeep import LogCheck
from bombus_coordinator import compaction, retention, storage
from bombus_coordinator.compaction import Cut, cut_of, is_long, usable
from bombus_coordinator.core import Core, PendingDecision
from bombus_coordinator.shell import EVENT_BYTES, GATHER_S
from bombus_coordinator.snapshotter import EVENTS, SnapshotPace
from tests.coordinator.core_in_memory import ENGINE, SECOND

BEGIN_NS = 1_000 * SECOND
HOUR_S, DAY_S = 3600, 86_400
SUBJECTS = Subjects("week")
TOKEN = "0123456789abcdef"  # of a connection, as in message ids
CHUNK = 4096  # events that are kept together
CLIENTS = 200
STEP_S = 20.0
CALL_S = 3.0  # between two calls of an episode


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the streams, by default those of new ones, and the pace of snapshots."""

    events: int = 1 << 30
    calls: int = 4 << 30
    snapshot_events: int = EVENTS


class Load(msgspec.Struct, frozen=True, kw_only=True):
    rate: float = 100.0  # calls a second
    calls: int = 10  # of an episode
    record_bytes: int = 4096  # of a call
    batch_size: int = 64
    num_repeat: int = 8


def stored_bytes(subject: int, headers: int, body: int) -> int:
    """Return what a message of these sizes takes in a file store of nats-server, which `max_bytes` limits."""
    return 30 + subject + body + (4 + headers if headers else 0)


class EventLog:
    """The stream of events: bodies and positions, packed, without an object for each event."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.first = 1
        self.last = 0
        self.bytes = 0
        self._chunks: dict[int, tuple[bytearray, array[int], array[int], array[int]]] = {}

    @property
    def state(self) -> StreamState:
        return StreamState(self.first, self.last, self.last - self.first + 1, self.bytes, self.size, 1)

    def append(self, body: bytes, stored: int, answers: int) -> None:
        number = self.last // CHUNK
        if number not in self._chunks:
            self._chunks[number] = (bytearray(), array("I", [0]), array("I"), array("Q"))
        bodies, ends, sizes, answered = self._chunks[number]
        bodies += body
        ends.append(len(bodies))
        sizes.append(stored)
        answered.append(answers)
        self.last += 1
        self.bytes += stored
        assert self.bytes <= self.size, "the log is full"

    def read(self, after: int, until: int, epoch: str) -> Iterator[Stored]:
        for seq in range(after + 1, until + 1):
            number, place = divmod(seq - 1, CHUNK)
            bodies, ends, _, answered = self._chunks[number]
            headers = {EPOCH: epoch, INBOX: str(answered[place])}
            yield Stored(seq, "", bytes(bodies[ends[place] : ends[place + 1]]), headers, 0)

    def purge_below(self, seq: int) -> None:
        for each in range(self.first, seq):
            number, place = divmod(each - 1, CHUNK)
            self.bytes -= self._chunks[number][2][place]
            if place == CHUNK - 1:
                del self._chunks[number]
        self.first = max(self.first, seq)


class CallStream:
    """The stream of calls, all of one size, as `retention.Purge` uses a bus."""

    subjects = SUBJECTS

    def __init__(self, size: int, record_bytes: int) -> None:
        self.size = size
        self.first = 1
        self.last = 0
        self._each = stored_bytes(len(SUBJECTS.call(ENGINE, "e")), 60, record_bytes)

    async def state(self, stream: str) -> StreamState:
        count = self.last - self.first + 1
        return StreamState(self.first, self.last, count, count * self._each, self.size, 1)

    async def purge_below(self, stream: str, seq: int, subject: str = ">") -> int:
        assert subject == ">", "one engine has all calls"
        gone = max(0, min(seq, self.last + 1) - self.first)
        self.first += gone
        return gone


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What one hour, or a part of one, ended with, and the most that it had of what is bounded."""

    second: int
    calls: int
    events: int
    events_fill: float  # the most
    calls_fill: float  # the most
    snapshots: int  # the most
    snapshot_bytes: int  # of all of them together, the most
    state_bytes: int  # of the newest snapshot: the fold, encoded
    compactions: int  # so far
    resident_bytes: int  # of this process, the most so far


class Week:
    """The hive. `run` yields each hour."""

    def __init__(self, load: Load, limits: Limits) -> None:
        self.load = load
        self.core = Core()
        self.events = EventLog(limits.events)
        self.calls = CallStream(limits.calls, load.record_bytes)
        self.snapshots: dict[int, bytes] = {}
        self.compactions = 0
        self.verified = 0  # events that were folded again
        self._pace = SnapshotPace(limits.snapshot_events)
        self._pick = random.Random(1)
        self._now_s = 0.0
        self._seq = 0  # of the inbox
        self._ids = itertools.count(1)
        self._later: list[tuple[float, int, inbox.AnyMessage]] = []
        self._gathering_s = 0.0  # since when calls wait for others; 0: none does
        self._peaks = [0.0, 0.0, 0, 0]
        self._snapshot_bytes = 0

    # ---- the bus ----

    def _send(self, message: inbox.AnyMessage) -> list[PendingDecision]:
        """Put a message into the inbox, and decide as the shell does: calls wait for others."""
        self._seq += 1
        decided = list(self.core.receive(message, self._seq, BEGIN_NS + int(self._now_s * SECOND)))
        if isinstance(message, inbox.CallRecorded | inbox.Touch):
            self._gathering_s = self._gathering_s or self._now_s
        else:
            decided += self._flush()
        self._append(decided)
        return decided

    def _flush(self) -> list[PendingDecision]:
        self._gathering_s = 0.0
        return list(self.core.flush())

    def _append(self, decided: list[PendingDecision]) -> None:
        for each in decided:
            for event, body in zip(each.decision.events, each.bodies):
                self._store(event, body, each.answers)
        if decided and self._pace.is_due(self.events.last):
            self._take_snapshot()

    def _store(self, event: ev.Event, body: bytes, answers: int) -> None:
        headers = {
            EPOCH: str(self.core.hive.epoch),
            INBOX: str(answers),
            MSG_ID: f"{TOKEN}.{self.core.hive.epoch}.{self.events.last + 1}",
            EXPECTED_LAST: str(self.events.last),
        }
        subject = len(SUBJECTS.event(event.engine, ev.kind_of(event)))
        self.events.append(body, stored_bytes(subject, header_bytes(headers), len(body)), answers)
        self._pace.wrote(len(body) + EVENT_BYTES)
        if isinstance(event, ev.BatchReady):
            self._train(event)

    # ---- the load ----

    def _at(self, seconds: float, message: inbox.AnyMessage) -> None:
        heapq.heappush(self._later, (self._now_s + seconds, next(self._ids), message))

    def _id(self) -> str:
        return f"{self._pick.getrandbits(128):032x}"

    def _boot(self) -> None:
        opening = self.core.open_epoch("leader")
        self._append([PendingDecision(opening, 0, tuple(map(ev.encode_event, opening.events)))])
        rules = Collection(
            batch_size=self.load.batch_size, num_repeat=self.load.num_repeat, max_open_claims=10_000, max_staleness=4
        )
        self._send(
            inbox.Configure(id="c", engine=ENGINE, config="{}", config_digest="d", collection=rules, model="model")
        )
        self._send(inbox.Start(id="s", engine=ENGINE))
        self._send(inbox.ReplicaAlive(id="a", engine=ENGINE, replica="r", url="http://r"))
        self._send(inbox.TrainerOpens(id="o", engine=ENGINE, run=1, trainer="t"))
        self._publish(0)

    def _publish(self, step: int) -> None:
        weights = Weights(where=f"/weights/{step}", bytes=1 << 30, sha256="f" * 64)
        saved = inbox.WeightsSaved(id=self._id(), engine=ENGINE, run=1, step=step, trainer_epoch=1, weights=weights)
        loaded = inbox.WeightsLoadedFact(id=self._id(), engine=ENGINE, run=1, version=step, replica="r")
        self._at(1.0, saved)
        self._at(2.0, loaded)

    def _train(self, batch: ev.BatchReady) -> None:
        done = inbox.StepDone(
            id=self._id(), engine=ENGINE, run=1, step=batch.step, trainer_epoch=1, checkpoint=f"/c/{batch.step}",
            checkpoint_digest="f" * 64, metrics={f"metric/{number}": 0.5 for number in range(20)},
        )  # fmt: skip
        self._at(STEP_S, done)

    def _play(self, number: int) -> None:
        """Claim an episode, and plan its calls and its end."""
        client = f"client-{number % CLIENTS:032}"
        claim = inbox.Claim(id=self._id(), engine=ENGINE, claim=self._id(), client=client, wait_s=2.0, owner="team")
        for pending in self._send(claim):
            for reply in pending.decision.replies:
                assert isinstance(reply.answer, inbox.Granted), reply.answer
                self._plan(reply.answer.episodes[0], claim, number)

    def _plan(self, episode: str, claim: inbox.Claim, number: int) -> None:
        self._at(0.05, inbox.Touch(id=self._id(), engine=ENGINE, confirmed=(claim.claim,)))
        at_s = 0.0
        for turn in range(self.load.calls):
            at_s += CALL_S * (0.5 + self._pick.random())
            ref = CallRef(0, self._id(), self._pick.randbytes(16))
            noted = NotedCall(episode, ref, 1_000 + 300 * turn, 250, 0, 0, merged=turn > 0)
            self._at(at_s, inbox.CallRecorded(id=f"recorded-{ref.id}", engine=ENGINE, run=1, call=noted))
        task = f"train/{number // self.load.num_repeat:07d}"
        result = EpisodeResult(episode=episode, task=task, reward=self._pick.random(), log_metrics={"turns": 10.0})
        self._at(at_s + 0.5, inbox.End(id=self._id(), engine=ENGINE, client=claim.client, results=(result,)))

    def _deliver(self, message: inbox.AnyMessage) -> None:
        if isinstance(message, inbox.CallRecorded):
            self.calls.last += 1
            ref = msgspec.structs.replace(message.call.ref, seq=self.calls.last)
            version = self.core.hive.engine(ENGINE).version
            call = msgspec.structs.replace(message.call, ref=ref, oldest=version, newest=version)
            message = msgspec.structs.replace(message, call=call)
        decided = self._send(message)
        if isinstance(message, inbox.End):
            answers = [reply.answer for each in decided for reply in each.decision.replies]
            assert any(isinstance(answer, inbox.Done) for answer in answers), answers
        if isinstance(message, inbox.StepDone):
            self._publish(message.step)

    # ---- time ----

    async def run(self, seconds: int, every_s: int = HOUR_S) -> list[Sample]:
        """Let so many seconds pass, and return what each `every_s` of them ended with.

        Raises `AssertionError` where the hive takes no more work.
        """
        self._boot()
        purge = retention.Purge(cast(Bus, self.calls))
        floors = retention.floors_of(self.core.hive)
        episodes, found = 0, list[Sample]()
        for second in range(1, seconds + 1):
            wanted = int(max(0, second - 5) * self.load.rate / self.load.calls)
            while episodes < wanted:
                self._at(self._pick.random(), inbox.Tick(id=f"claim {episodes}"))
                episodes += 1
            self._until(float(second))
            self._every_second(second)
            if second % int(retention.PERIOD_S) == 0:
                await purge.below(floors)
                floors = retention.floors_of(self.core.hive)
            self._peaks[1] = max(self._peaks[1], (await self.calls.state("")).fill)
            if second % int(compaction.PERIOD_S) == 0:
                self._compact(second)
            if second % every_s == 0:
                found.append(self._sample(second))
                say(found[-1])
        return found

    def _until(self, until_s: float) -> None:
        while self._later and self._later[0][0] <= until_s:
            at_s, _, message = heapq.heappop(self._later)
            if self._gathering_s and at_s > self._gathering_s + GATHER_S:
                self._append(self._flush())
            self._now_s = at_s
            if isinstance(message, inbox.Tick):
                self._play(int(message.id.removeprefix("claim ")))
            else:
                self._deliver(message)
        self._now_s = until_s

    def _every_second(self, second: int) -> None:
        """Do what services do in each second: the leader's tick, gateways' touches, a replica's heartbeat."""
        engine = self.core.hive.engine(ENGINE)
        self._send(inbox.Touch(id=f"touch-{second}", engine=ENGINE, episodes=tuple(engine.open)))
        alive = inbox.ReplicaAlive(id=f"alive-{second}", engine=ENGINE, replica="r", url="http://r", run=1)
        self._send(msgspec.structs.replace(alive, version=engine.version))
        self._send(inbox.Tick(id=f"tick-{second}", answered=self._seq))
        events = self.events.state
        self._peaks[0] = max(self._peaks[0], events.fill)
        place = inbox.StorageSeen(
            id="", what="events", used=events.bytes, size=events.max_bytes, reserve=events.max_bytes // 10
        )
        assert not storage.is_full(self.core.hive, place), "the hive takes no more work"

    # ---- snapshots and compaction ----

    def _take_snapshot(self) -> None:
        position = self.events.last
        taken = Snapshot(fold=FOLD, position=position, event_id="", answered=self._seq, hive=self.core.hive)
        self.snapshots[position] = snapshots.encode(taken)
        self._pace.took(position)
        self._snapshot_bytes = len(self.snapshots[position])
        self._pace.note(position, self.events.state)
        self._prune()
        self._peaks[2] = max(self._peaks[2], len(self.snapshots))
        self._peaks[3] = max(self._peaks[3], sum(map(len, self.snapshots.values())))

    def _prune(self) -> None:
        kept = snapshots.needed(sorted(self.snapshots), self.events.first, self.events.last)
        self.snapshots = {position: self.snapshots[position] for position in kept}

    def _compact(self, second: int) -> None:
        """Compact as the leader does. Verification takes no virtual time: it has minutes, and needs seconds."""
        if not is_long(self.events.state):
            return
        cut = cut_of(self.events.state, usable(self.events.state, sorted(self.snapshots)))
        if cut is None:
            self._pace.ask()
            return
        self._verify(cut)
        self.events.purge_below(cut.at)
        self._prune()
        self.compactions += 1
        self._send(inbox.CompactionTried(id=f"compaction-{second}", below=cut.at))

    def _verify(self, cut: Cut) -> None:
        base = min(self.snapshots) if self.events.first > 1 else 0
        empty = Snapshot(fold=FOLD, position=0, event_id="", answered=0, hive=Hive())
        check = LogCheck(snapshots.decode(self.snapshots[base]) if base else empty)
        for stored in self.events.read(check.position, cut.until, str(self.core.hive.epoch)):
            check.take(stored)
            if stored.seq in (cut.at, cut.until):
                check.compare(snapshots.decode(self.snapshots[stored.seq]))
        self.verified += cut.until - base

    def _sample(self, second: int) -> Sample:
        (events_fill, calls_fill, count, size), self._peaks = self._peaks, [0.0, 0.0, 0, 0]
        return Sample(
            second=second,
            calls=self.calls.last,
            events=self.events.last,
            events_fill=events_fill,
            calls_fill=calls_fill,
            snapshots=int(count),
            snapshot_bytes=int(size),
            state_bytes=self._snapshot_bytes,
            compactions=self.compactions,
            resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )


def say(sample: Sample) -> None:
    print(
        f"hour {sample.second / HOUR_S:6.2f}: {sample.calls:11,} calls, {sample.events:11,} events; at most: events "
        f"{sample.events_fill:4.0%}, calls {sample.calls_fill:4.0%}, {sample.snapshots} snapshots of "
        f"{byte_size(sample.snapshot_bytes)}; the state {byte_size(sample.state_bytes)}, {sample.compactions} "
        f"compactions, memory {byte_size(sample.resident_bytes)}",
        flush=True,
    )


def check_streams(hours: list[Sample]) -> None:
    """Check that there was always room for new work, and the log was compacted again and again."""
    assert max(hour.events_fill for hour in hours) < 1 - storage.RESERVE
    assert max(hour.calls_fill for hour in hours) < 1 - storage.RESERVE
    assert max(hour.snapshots for hour in hours) <= 2 * snapshots.PARTS + snapshots.KEPT + 1
    assert hours[-1].compactions > 2


def check_growth(hours: list[Sample]) -> None:
    """Check that nothing grows: the last third of the time has no more than a tenth over the third before it."""
    third = len(hours) // 3
    before, last = hours[third : 2 * third], hours[2 * third :]
    for name in ("snapshot_bytes", "state_bytes", "resident_bytes"):
        most = max(getattr(hour, name) for hour in before)
        assert max(getattr(hour, name) for hour in last) <= 1.1 * most, f"{name} grows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--rate", type=float, default=100.0, help="calls a second")
    parser.add_argument("--calls", type=int, default=10, help="calls of an episode")
    arguments = parser.parse_args()
    began = time.perf_counter()
    week = Week(Load(rate=arguments.rate, calls=arguments.calls), Limits())
    hours = asyncio.run(week.run(round(arguments.days * DAY_S)))
    check_streams(hours)
    check_growth(hours)
    cost = (week.events.bytes / week.events.state.messages) * week.events.last / week.calls.last
    print(
        f"{cost:.0f} bytes of the log a call; {week.verified:,} events folded again by {week.compactions} compactions"
    )
    print(f"all bounds hold; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
