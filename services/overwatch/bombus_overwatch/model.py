"""The fold that the screen draws: the state of the hive, and the histories for curves and the tail.

Pure: no clock, no I/O, no widgets. Everything that grows has a limit.
"""

from collections import deque

import msgspec

from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.describe import KINDS, EventGroup
from bombus.hive.events import AbortReason, EpisodeType, Event
from bombus.hive.fold.evolve import evolve
from bombus.hive.operations.state import FORWARD_BACKWARD, OPTIM_STEP, mean_loss
from bombus.hive.state import EngineState, EvalStats, Hive

TAIL_KEPT = 500  # events per group of an engine, so that many calls do not displace other events
VERSIONS_KEPT = 4_096
STEPS_KEPT = 4_096
SECONDS_KEPT = 600
STAGES_KEPT = 100
MODELS_SHOWN = 64  # models whose history is kept: the most recently trained
SECOND = 1_000_000_000


class LoggedEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event and its position on the log."""

    position: int
    event: Event


class StepPoint(msgspec.Struct, frozen=True, array_like=True):
    step: int
    at_ns: int
    metrics: dict[str, float]


class SecondCounts(msgspec.Struct, array_like=True):
    """Tokens and episodes that came in during one second of log time."""

    second: int
    tokens: int = 0
    episodes: int = 0


class Stage(msgspec.Struct, frozen=True, array_like=True):
    name: str
    at_ns: int


def _tails() -> dict[EventGroup, deque[LoggedEvent]]:
    return {group: deque(maxlen=TAIL_KEPT) for group in EventGroup}


class ModelHistory(msgspec.Struct):
    """The results of one model's operations. `losses` has the mean loss per token of each forward_backward."""

    losses: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    grad_norms: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    seconds: deque[SecondCounts] = msgspec.field(default_factory=lambda: deque(maxlen=SECONDS_KEPT))


class EngineHistory(msgspec.Struct, kw_only=True):
    """The history of one engine. Everything but the tails is reset when a run starts."""

    tails: dict[EventGroup, deque[LoggedEvent]] = msgspec.field(default_factory=_tails)
    # Rewards of training episodes, by policy version when claimed, or by the number of the model they sampled from.
    rewards: dict[int, EvalStats] = {}
    samplers: dict[str, int] = {}  # saved models, numbered in the order in which their first episodes ended
    samplers_seen: int = 0
    steps: deque[StepPoint] = msgspec.field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    seconds: deque[SecondCounts] = msgspec.field(default_factory=lambda: deque(maxlen=SECONDS_KEPT))
    stages: deque[Stage] = msgspec.field(default_factory=lambda: deque(maxlen=STAGES_KEPT))
    booted_ns: int = 0
    aborted: dict[str, int] = {}  # number of episodes, by kind of failure or reason
    dropped: dict[str, int] = {}
    models: dict[str, ModelHistory] = {}  # of training clients, most recently trained last


class HiveView(msgspec.Struct, kw_only=True):
    """Everything that the screen can show at `position`."""

    hive: Hive = msgspec.field(default_factory=Hive)
    position: int = 0
    histories: dict[str, EngineHistory] = {}

    def history(self, engine: str) -> EngineHistory:
        history = self.histories.get(engine)
        if history is None:
            history = self.histories[engine] = EngineHistory()
        return history


def fold(view: HiveView, position: int, event: Event) -> None:
    """Fold the event at `position` of the log into the view, in place."""
    evolve(view.hive, event)
    view.position = position
    if isinstance(event, ev.EngineStarted):
        view.histories[event.engine] = EngineHistory(tails=view.history(event.engine).tails)
    history = view.history(event.engine)
    _remember(history, LoggedEvent(position, event))
    _note(history, event, view.hive.engine(event.engine))


def _remember(history: EngineHistory, logged: LoggedEvent) -> None:
    kind = KINDS[type(logged.event)]
    history.tails[EventGroup.ALL].append(logged)
    history.tails[kind.group].append(logged)
    if kind.trouble:
        history.tails[EventGroup.TROUBLE].append(logged)


def _note(history: EngineHistory, event: Event, engine: EngineState) -> None:
    match event:
        case ev.CallsNoted():
            _second_of(history, event.at_ns).tokens += sum(call.completion_tokens for call in event.calls)
        case ev.EpisodeEnded():
            _ended(history, event, engine)
        case ev.EpisodeAborted():
            why = event.failure or ("by its client" if event.reason == AbortReason.CLIENT else str(event.reason))
            history.aborted[why] = history.aborted.get(why, 0) + len(event.episodes)
        case ev.GroupDropped():
            history.dropped[event.reason] = history.dropped.get(event.reason, 0) + len(event.episodes)
        case ev.PoolCleared():
            history.dropped[event.reason] = history.dropped.get(event.reason, 0) + event.episodes
        case ev.StepCompleted():
            history.steps.append(StepPoint(event.step, event.at_ns, event.metrics))
        case ev.OperationCompleted() if not event.failed:
            _computed(history, event)
        case ev.EngineProgressed():
            history.stages.append(Stage(event.stage, event.at_ns))
        case ev.EngineBooted():
            history.booted_ns = event.at_ns
        case _:
            pass


def _computed(history: EngineHistory, event: ev.OperationCompleted) -> None:
    if event.op not in (FORWARD_BACKWARD, OPTIM_STEP):
        return
    model = history.models.pop(event.model, None) or ModelHistory()
    history.models[event.model] = model
    trim(history.models, MODELS_SHOWN)
    _second_of(model, event.at_ns).tokens += int(event.metrics.get("tokens", 0.0))
    if (loss := mean_loss(event.metrics)) is not None:
        model.losses.append(loss)
    if event.op == OPTIM_STEP and "grad_norm" in event.metrics:
        model.grad_norms.append(event.metrics["grad_norm"])


def _second_of(history: EngineHistory | ModelHistory, at_ns: int) -> SecondCounts:
    second = at_ns // SECOND
    if not history.seconds or history.seconds[-1].second < second:
        history.seconds.append(SecondCounts(second))
    return history.seconds[-1]


def _ended(history: EngineHistory, event: ev.EpisodeEnded, engine: EngineState) -> None:
    _second_of(history, event.at_ns).episodes += len(event.outcomes)
    if event.type == EpisodeType.EVAL:
        return  # the hive's state has statistics of eval episodes
    for outcome in event.outcomes:
        stats = history.rewards.setdefault(_played_with(history, event, outcome.episode, engine), EvalStats())
        stats.episodes += 1
        stats.reward_sum += outcome.reward
        stats.successes += bool(outcome.is_success)
    while len(history.rewards) > VERSIONS_KEPT:
        del history.rewards[next(iter(history.rewards))]


def _played_with(history: EngineHistory, event: ev.EpisodeEnded, episode: str, engine: EngineState) -> int:
    """Return the policy version of an ended episode or, in an operations run, the number of its saved model."""
    completed = engine.pool.get(episode)
    if not engine.clients_take_episodes or completed is None:
        return event.version
    number = history.samplers.get(completed.sampler)
    if number is None:
        history.samplers_seen += 1
        number = history.samplers[completed.sampler] = history.samplers_seen
        trim(history.samplers, VERSIONS_KEPT)
    return number
