"""Deadlines of work count the time in which a leader was at work, however often leaders die or stand still (R5)."""

import random
from collections.abc import Callable

import pytest

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AnyEvent, Collection, Event, Method
from bombus.hive.fold.evolve import evolve
from bombus.hive.pauses import PAUSES_KEPT, Pause, led_ns, note_pause
from bombus.hive.state import Hive, Phase
from bombus_coordinator.core import Core
from tests.coordinator.core_in_memory import ENGINE, SECOND, CoreHarness
from tests.coordinator.operations_in_memory import OperationHarness
from tests.effort import effort

LIMIT_S = 60


def booting() -> CoreHarness:
    harness = CoreHarness()
    harness.configure(Collection(boot_s=LIMIT_S))
    harness.send(inbox.Start(id=harness.id(), engine=ENGINE))
    return harness


def draining() -> CoreHarness:
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=1, drain_s=LIMIT_S)
    harness.claim()
    harness.play("t")
    assert harness.phase() == Phase.ROLLING_POST
    return harness


def holding() -> CoreHarness:
    """Return a hive whose complete batch waits for an episode that would be too old for the next one."""
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=1, max_staleness=1, drain_s=LIMIT_S)
    (slow,) = harness.claim()
    harness.call(slow)
    harness.play("a")
    harness.train()
    harness.play("b")
    return harness


def syncing() -> CoreHarness:
    """Return a hive one of whose two replicas does not load the newest weights."""
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=1, sync_s=LIMIT_S)
    second = inbox.ReplicaAlive(id=harness.id(), engine=ENGINE, replica="r2", url="http://r2", run=1, version=0)
    harness.send(second)
    harness.play("a")
    harness.step_done(1)
    harness.save_weights(1)
    harness.load(1)
    return harness


def agreed() -> CoreHarness:
    harness = CoreHarness()
    harness.boot(Method.ANY_CLIENT_AGREES, agreed_sync_s=LIMIT_S)
    harness.play("a", client="c1")
    harness.request(inbox.AgreeSync(id="x", engine=ENGINE, client="c1"))
    harness.train()
    assert harness.phase() == Phase.WEIGHT_SYNCING
    return harness


def ending() -> CoreHarness:
    """Return a hive with a model that could not be saved as its session ended, which is tried again after a minute."""
    harness = OperationHarness().serving()
    harness.close_session()
    harness.done(next(key for key, each in harness.model.operations.items() if each.waits), failed=True)
    return harness


def idling() -> CoreHarness:
    """Return a hive whose run of operations has no model any more."""
    harness = OperationHarness()
    harness.limits(run_idle_s=LIMIT_S)
    harness.serving()
    harness.operate("1", "end_model")
    harness.done("1", closes=True)
    return harness


def modelless() -> CoreHarness:
    """Return a hive with a session for one model, which it has not created."""
    harness = OperationHarness()
    harness.limits(run_idle_s=1e6)
    harness.serving().open_session("t", for_model=True)
    return harness


WORK: dict[Callable[[], CoreHarness], type[Event]] = {
    booting: ev.EngineSuspended,
    draining: ev.EpisodeAborted,
    holding: ev.BatchReady,
    syncing: ev.ReplicaQuarantined,
    agreed: ev.RollingStarted,
    ending: ev.OperationAccepted,
    idling: ev.EngineStopped,
    modelless: ev.SessionEnded,
}


class Leaders:
    """Leaders of a hive, each of which ticks every second, and dies or stands still again and again."""

    def __init__(self, harness: CoreHarness, pick: random.Random) -> None:
        self._harness, self._pick = harness, pick
        self._ticked_ns = harness.now_ns
        self.ticks = 0
        harness.core.live.ticked_ns = harness.now_ns

    def tick(self, after_s: float = 1.0) -> list[AnyEvent]:
        self._harness.now_ns += int(after_s * SECOND)
        self._all_are_alive()
        self.ticks += 1
        after_ns, self._ticked_ns = self._ticked_ns, self._harness.now_ns
        tick = inbox.Tick(id=self._harness.id(), answered=self._harness.seq, after_ns=after_ns)
        return [event for event in self._harness.send(tick) if not isinstance(event, ev.LeadingPaused)]

    def pause(self) -> list[AnyEvent]:
        """Let time pass without a leader, in which messages come; then let the next one read them."""
        seconds = self._pick.choice((4.5, 2.5 + 90 * self._pick.random()))
        if self._pick.random() < 0.5:
            self._die()
        came = sorted(self._pick.random() * seconds for _ in range(self._pick.randint(0, 3)))
        for before, at in zip([0.0, *came], came):
            nothing = inbox.Abort(id=self._harness.id(), engine=ENGINE, client="c1", episodes=())
            assert self._harness.send(nothing, after_s=at - before) == [], "nobody knows yet for how long nobody led"
        return self.tick(after_s=seconds - (came[-1] if came else 0.0))

    def _die(self) -> None:
        """Let another leader take over, or the same one after a restart: it has what the log says."""
        hive = Hive()
        for event in self._harness.log:
            evolve(hive, event)
        self._harness.core = Core(hive)
        self._harness.log += self._harness.core.open_epoch("next").events
        assert list(self._harness.core.recover()) == []

    def _all_are_alive(self) -> None:
        engine = self._harness.engine
        for name, replica in engine.replicas.items():
            self._harness.send(
                inbox.ReplicaAlive(
                    id=self._harness.id(), engine=ENGINE, replica=name, url=replica.url, run=engine.run,
                    version=replica.version if name in engine.loaded else -1,
                )
            )  # fmt: skip
        claims = tuple(episode.claim for episode in engine.open.values())
        self._harness.send(inbox.Touch(id="t", engine=ENGINE, episodes=tuple(engine.open), confirmed=claims))


@pytest.mark.parametrize("begin", WORK, ids=lambda begin: begin.__name__)
def test_r5_work_has_its_time_under_leaders_that_die_or_stand_still_and_no_more(
    begin: Callable[[], CoreHarness],
) -> None:
    """Each tick stands for a second, whichever leader sends it: the last of its time is the end of the work."""
    for seed in range(effort(10, 200)):
        pick = random.Random(seed)
        leaders = Leaders(begin(), pick)
        decided: list[AnyEvent] = []
        while leaders.ticks < LIMIT_S:
            assert decided == [], f"seed {seed}: it had {leaders.ticks} of {LIMIT_S} seconds"
            is_led = leaders.ticks % 18 or pick.random() < 0.3
            decided = leaders.tick() if is_led else leaders.pause()
        assert WORK[begin] in map(type, decided), f"seed {seed}: it had its time"


def test_r5_the_time_that_was_led_leaves_out_pauses_however_many_there_were() -> None:
    """Of very many the oldest are forgotten, and a deadline that began before them has more time, never less."""
    pick = random.Random(5)
    pauses: list[Pause] = []
    led = [0]  # of each second
    while len(led) < 4 * PAUSES_KEPT:
        led += [led[-1] + second for second in range(1, pick.randint(2, 4))]
        since = len(led) - 1
        led += [led[-1]] * pick.randint(1, 3)
        note_pause(pauses, since, len(led) - 1)
    now = len(led) - 1
    assert len(pauses) == PAUSES_KEPT
    for at in range(now + 1):
        counted = led_ns(pauses, now) - led_ns(pauses, at)
        truth = led[now] - led[at]
        assert counted == truth if at >= pauses[0].until_ns else counted <= truth


def test_r5_ticks_that_are_a_little_late_are_no_pause_and_those_of_earlier_versions_say_nothing() -> None:
    harness = booting()
    assert harness.send(inbox.Tick(id="a", after_ns=harness.now_ns), after_s=2) == []
    assert harness.send(inbox.Tick(id="b"), after_s=57) == []
    assert [type(each) for each in harness.send(inbox.Tick(id="c"), after_s=1)] == [ev.EngineSuspended]
