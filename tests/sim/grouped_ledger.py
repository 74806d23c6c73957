"""What must hold, in the simulator, of runs whose episodes become rollout groups.

Each ended episode is in one group at most, and each group is taken once: by a step of our own trainer, or by a batch of
an outside one. None is taken or given up before its time, but to make room in a full stream, and none is forgotten.
"""

from collections import Counter
from collections.abc import Callable

from bombus.errors import LogCorrupted
from bombus.hive import events as ev
from bombus.hive.events import DropReason, EpisodeType, Event
from bombus.hive.inbox import EpisodeResult
from bombus.hive.records import BodyRef
from bombus.hive.state import EngineState, Hive, Phase
from bombus_coordinator.rules.crowding import WHY_GIVEN_UP
from bombus_coordinator.rules.episodes import outcome_digest
from tests.sim.operations import fetch
from tests.sim.rollout_groups import check_crowded
from tests.sim.server import TRAJECTORIES_STREAM, Server

GROUPED_ENGINE = "grouped"
BATCH = 4  # sequences


class GroupedLedger:
    """Sees every event of the engine, and every answer to its clients."""

    engine = GROUPED_ENGINE

    def __init__(self, server: Server, hive: Callable[[], Hive], seen: Counter[str]) -> None:
        """`hive` is the fold of the log."""
        self.hive = hive
        self.seen = seen
        self._server = server
        self._ends: dict[str, bytes] = {}  # by episode: the digest of its outcome
        self._training: set[str] = set()  # ended training episodes
        self._grouped: set[str] = set()
        self._gone: set[str] = set()  # episodes that were dropped, or whose run has ended
        self._waiting: dict[int, int | None] = {}  # groups: the version at which each of episodes was queued

    def check(self, event: Event, engine: EngineState) -> None:
        """Check an event before it is folded."""
        match event:
            case ev.EngineStarted():
                assert event.config_digest
                assert not event.base
                self._gone |= set(engine.pool)
            case ev.EngineStopped() | ev.EngineFailed() | ev.GroupsReset():
                self._waiting.clear()
            case ev.EpisodeClaimed():
                self._check_claimed(event, engine)
            case ev.EpisodeEnded():
                ended = {outcome.episode: outcome.digest for outcome in event.outcomes}
                assert not ended.keys() & self._ends.keys(), "an episode ends once"
                self._ends |= ended
                self._training |= ended.keys() if event.type == EpisodeType.TRAIN else set[str]()
            case ev.GroupsPushed():
                self._check_pushed(event, engine)
            case ev.GroupDropped():
                self._check_dropped(event, engine)
            case ev.PoolCleared():
                self._gone |= set(engine.pool)
            case _:
                self._check_taken(event, engine)

    def _check_taken(self, event: Event, engine: EngineState) -> None:
        match event:
            case ev.BatchReady():
                assert engine.makes_steps
                assert event.step == engine.step + 1
                self._take(event.taken, engine)
                self.seen["steps of groups of episodes"] += 1
            case ev.BatchHandedOut():
                assert not engine.makes_steps
                batch = engine.trajectories.batch
                assert batch is None or batch.delivered
                self._take(event.groups, engine)
                self.seen["batches of groups of episodes"] += 1
            case ev.GroupsGivenUp():
                assert (event.number, bool(event.why)) == (0, True), "no body is lost here"
                if event.why == WHY_GIVEN_UP:
                    check_crowded(self.hive(), event, engine)
                    for number in event.groups:
                        del self._waiting[number]
                    return
                for number in event.groups:
                    queued = self._waiting.pop(number)
                    assert queued is not None, "the age of what is pushed is not known"
                    assert engine.version - queued > engine.collection.max_carry_staleness
                    self.seen["groups that waited too long"] += 1

    def _take(self, numbers: tuple[int, ...], engine: EngineState) -> None:
        """Check that a batch is exact, and that all of it was waiting, and for no longer than it may."""
        groups = [engine.trajectories.queue.groups[number] for number in numbers]
        assert sum(group.sequences for group in groups) == BATCH
        for number in numbers:
            queued = self._waiting.pop(number)
            assert queued is None or engine.version - queued <= engine.collection.max_carry_staleness

    def _check_claimed(self, event: ev.EpisodeClaimed, engine: EngineState) -> None:
        """Check that no episode is handed out while as many batches are ahead of it as may be."""
        assert engine.phase == Phase.ROLLING
        assert len(engine.open) + len(event.episodes) <= engine.collection.max_open_claims
        batch = engine.trajectories.batch
        unfinished = engine.step - engine.version + (batch is not None and not batch.delivered)
        if unfinished and event.type == EpisodeType.TRAIN:
            queued = engine.trajectories.queue.sequences // BATCH
            assert unfinished + queued <= engine.collection.max_carry_staleness
            self.seen["claimed while a batch is under way"] += 1

    def _check_pushed(self, event: ev.GroupsPushed, engine: EngineState) -> None:
        episodes = set(event.episodes)
        assert episodes <= engine.pool.keys()
        assert not episodes & self._grouped, "an episode is in one group"
        assert event.version == (engine.version if episodes else -1)
        self._grouped |= episodes
        self.seen["episodes in groups"] += len(episodes)
        for number, group in enumerate(event.groups, start=engine.trajectories.queue.arrived + 1):
            assert group.body is not None
            self._fetch(group.body)
            self._waiting[number] = event.version if episodes else None

    def _check_dropped(self, event: ev.GroupDropped, engine: EngineState) -> None:
        assert set(event.episodes) <= engine.pool.keys()
        if event.reason == DropReason.STALE:
            tasks = {engine.pool[episode].task for episode in event.episodes}
            size = engine.collection.num_repeat
            assert all(len(engine.by_task[task]) < size for task in tasks), "a complete task waits for the leader"
        else:
            assert event.reason == DropReason.UNFIT
        self._gone |= set(event.episodes)
        self.seen[f"episodes dropped: {event.reason}"] += len(event.episodes)

    def fetch(self, ref: BodyRef) -> bytes:
        """Return a body. Raises `LogCorrupted` when it is gone."""
        return fetch(self._server, ref, TRAJECTORIES_STREAM)

    def _fetch(self, ref: BodyRef) -> None:
        try:
            self.fetch(ref)
        except LogCorrupted as error:
            raise AssertionError(f"a body that is needed is gone: {error}") from error

    def purged(self) -> None:
        """Check that what is needed is still there, whatever was purged."""
        for group in self.hive().engine(GROUPED_ENGINE).groups_needed():
            assert group.body is not None
            self._fetch(group.body)

    def acknowledged_end(self, result: EpisodeResult) -> None:
        found = self._ends.get(result.episode)
        assert found == outcome_digest(result), f"the end of {result.episode} was acknowledged, but is not on the log"
        self.seen["ends of grouped episodes acknowledged"] += 1

    @property
    def taken(self) -> int:
        """Return how many batches were taken so far."""
        return self.seen["steps of groups of episodes"] + self.seen["batches of groups of episodes"]

    def finish(self) -> None:
        engine = self.hive().engine(GROUPED_ENGINE)
        assert engine.trajectories.queue.groups.keys() == self._waiting.keys()
        pool = set(engine.pool)
        assert self._training == pool | self._grouped | self._gone, "every ended episode is in one of them"
        assert not pool & (self._grouped | self._gone)
        assert not self._grouped & self._gone
