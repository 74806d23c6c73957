"""The fold behind the screen: the state of the hive, and the histories that curves and the tail need.

Pure: no clock, no I/O, no widget. Everything that grows has a bound.
"""

from collections import deque

import msgspec

from bombus.hive import events as ev
from bombus.hive.events import EpisodeType, Event
from bombus.hive.state import EvalStats, Hive, evolve
from bombus_overwatch.describe import GROUPS, TROUBLE, Group

TAIL_KEPT = 500  # events, for each group of an engine: a flood of calls does not wash away the rest
VERSIONS_KEPT = 4_096
STEPS_KEPT = 4_096
BINS_KEPT = 600
STAGES_KEPT = 100
SECOND = 1_000_000_000


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """An event and its place on the log."""

    position: int
    event: Event


class StepPoint(msgspec.Struct, frozen=True, array_like=True):
    step: int
    at_ns: int
    metrics: dict[str, float]


class Bin(msgspec.Struct, array_like=True):
    """What came in during one second of log time."""

    second: int
    tokens: int = 0
    episodes: int = 0


class Stage(msgspec.Struct, frozen=True, array_like=True):
    name: str
    at_ns: int


def _tails() -> dict[Group, deque[Kept]]:
    return {group: deque(maxlen=TAIL_KEPT) for group in Group}


class Trail(msgspec.Struct, kw_only=True):
    """What one engine leaves behind. Everything but the tails begins anew with each run."""

    tails: dict[Group, deque[Kept]] = msgspec.field(default_factory=_tails)
    rewards: dict[int, EvalStats] = {}  # of training episodes, by the policy version at their claim
    steps: deque[StepPoint] = msgspec.field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    bins: deque[Bin] = msgspec.field(default_factory=lambda: deque(maxlen=BINS_KEPT))
    stages: deque[Stage] = msgspec.field(default_factory=lambda: deque(maxlen=STAGES_KEPT))
    booted_ns: int = 0
    aborted: dict[str, int] = {}  # episodes, by reason
    dropped: dict[str, int] = {}


class View(msgspec.Struct, kw_only=True):
    """Everything that the screen can show, as of `position`."""

    hive: Hive = msgspec.field(default_factory=Hive)
    position: int = 0
    trails: dict[str, Trail] = {}

    def trail(self, engine: str) -> Trail:
        trail = self.trails.get(engine)
        if trail is None:
            trail = self.trails[engine] = Trail()
        return trail


def fold(view: View, position: int, event: Event) -> None:
    """Fold the event at `position` of the log into the view, in place."""
    evolve(view.hive, event)
    view.position = position
    if isinstance(event, ev.EngineStarted):
        view.trails[event.engine] = Trail(tails=view.trail(event.engine).tails)
    trail = view.trail(event.engine)
    _remember(trail, Kept(position, event))
    _note(trail, event)


def _remember(trail: Trail, kept: Kept) -> None:
    kind = type(kept.event)
    trail.tails[Group.ALL].append(kept)
    trail.tails[GROUPS[kind]].append(kept)
    if kind in TROUBLE:
        trail.tails[Group.TROUBLE].append(kept)


def _note(trail: Trail, event: Event) -> None:
    match event:
        case ev.CallsNoted():
            _bin(trail, event.at_ns).tokens += sum(call.completion_tokens for call in event.calls)
        case ev.EpisodeEnded():
            _ended(trail, event)
        case ev.EpisodeAborted():
            trail.aborted[event.reason] = trail.aborted.get(event.reason, 0) + len(event.episodes)
        case ev.GroupDropped():
            trail.dropped[event.reason] = trail.dropped.get(event.reason, 0) + len(event.episodes)
        case ev.PoolCleared():
            trail.dropped[event.reason] = trail.dropped.get(event.reason, 0) + event.episodes
        case ev.StepCompleted():
            trail.steps.append(StepPoint(event.step, event.at_ns, event.metrics))
        case ev.EngineProgressed():
            trail.stages.append(Stage(event.stage, event.at_ns))
        case ev.EngineBooted():
            trail.booted_ns = event.at_ns
        case _:
            pass


def _bin(trail: Trail, at_ns: int) -> Bin:
    second = at_ns // SECOND
    if not trail.bins or trail.bins[-1].second < second:
        trail.bins.append(Bin(second))
    return trail.bins[-1]


def _ended(trail: Trail, event: ev.EpisodeEnded) -> None:
    _bin(trail, event.at_ns).episodes += len(event.outcomes)
    if event.type == EpisodeType.EVAL:
        return  # the state keeps those
    stats = trail.rewards.setdefault(event.version, EvalStats())
    for outcome in event.outcomes:
        stats.episodes += 1
        stats.reward_sum += outcome.reward
        stats.successes += bool(outcome.is_success)
    while len(trail.rewards) > VERSIONS_KEPT:
        del trail.rewards[next(iter(trail.rewards))]
