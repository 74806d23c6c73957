"""The fold that the screen draws: the state of the hive, and what it does not keep: rates, episodes, figures by step.

Pure: no clock, no I/O, no widgets. Everything that grows has a limit.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.describe import KINDS, EventGroup
from bombus.hive.events import AbortReason, AnyEvent, EpisodeType, Event, NotedCall
from bombus.hive.fold.evolve import evolve
from bombus.hive.operations.state import FORWARD_BACKWARD, OPTIM_STEP, mean_loss
from bombus.hive.state import EngineState, EvalStats, Hive
from bombus.insight.metrics import step_metrics
from bombus.insight.runs import Runs

TAIL_KEPT = 500  # events per group of an engine, so that many calls do not displace other events
VERSIONS_KEPT = 4_096
STEPS_KEPT = 4_096
SECONDS_KEPT = 600
STAGES_KEPT = 100
EPISODES_KEPT = 4_096
CALLS_KEPT = 64  # the newest of each episode
RUNS_KEPT = 8  # runs whose figures by step are kept
MODELS_SHOWN = 64  # models whose history is kept: the most recently trained
SECOND = 1_000_000_000


class LoggedEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event and its position on the log."""

    position: int
    event: Event


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


class EpisodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of an episode, open or over. `step` is the step whose batch it is in, or 0.

    `calls` has the newest calls, each with the time when it was noted. `failure` is the kind of failure, or "".
    """

    episode: str
    task: str
    client: str
    type: EpisodeType
    version: int
    claimed_ns: int
    over_ns: int = 0
    fate: str = "open"
    reward: float | None = None
    is_success: bool | None = None
    failure: str = ""
    step: int = 0
    calls: tuple[tuple[int, NotedCall], ...] = ()
    calls_made: int = 0
    tokens: int = 0


class EngineHistory(msgspec.Struct, kw_only=True):
    """The history of one engine. Everything but the tails is reset when a run starts."""

    tails: dict[EventGroup, deque[LoggedEvent]] = msgspec.field(default_factory=_tails)
    rewards: dict[int, EvalStats] = {}  # in an operations run, by the number of the saved model that was sampled from
    samplers: dict[str, int] = {}  # saved models, numbered in the order in which their first episodes ended
    samplers_seen: int = 0
    seconds: deque[SecondCounts] = msgspec.field(default_factory=lambda: deque(maxlen=SECONDS_KEPT))
    stages: deque[Stage] = msgspec.field(default_factory=lambda: deque(maxlen=STAGES_KEPT))
    booted_ns: int = 0
    aborted: dict[str, int] = {}  # number of episodes, by kind of failure or reason
    dropped: dict[str, int] = {}
    models: dict[str, ModelHistory] = {}  # of training clients, most recently trained last
    episodes: dict[str, EpisodeRecord] = {}  # the newest of the run, in the order in which they were claimed


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
    _record(history, event)


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
    for outcome in event.outcomes:
        completed = engine.pool.get(outcome.episode)
        if completed is None or not engine.clients_take_episodes or event.type == EpisodeType.EVAL:
            continue  # figures by step have the rewards of jobs, and the hive's state those of held-out tasks
        stats = history.rewards.setdefault(_number_of(history, completed.sampler), EvalStats())
        stats.episodes += 1
        stats.reward_sum += outcome.reward
        stats.successes += bool(outcome.is_success)
    while len(history.rewards) > VERSIONS_KEPT:
        del history.rewards[next(iter(history.rewards))]


def _number_of(history: EngineHistory, sampler: str) -> int:
    """Return the number of a saved model."""
    number = history.samplers.get(sampler)
    if number is None:
        history.samplers_seen += 1
        number = history.samplers[sampler] = history.samplers_seen
        trim(history.samplers, VERSIONS_KEPT)
    return number


# ---- episodes -----------------------------------------------------------------------------------------------------


def _record(history: EngineHistory, event: Event) -> None:
    match event:
        case ev.EpisodeClaimed():
            _claimed(history, event)
        case ev.CallsNoted():
            _called(history, event)
        case ev.EpisodeEnded():
            for outcome in event.outcomes:
                found = {"task": outcome.task, "reward": outcome.reward, "is_success": outcome.is_success}
                failure = outcome.failure or ""
                _change(history, [outcome.episode], fate="ended", over_ns=event.at_ns, failure=failure, **found)
        case ev.EpisodeAborted():
            fate = f"aborted: {event.reason}" + (f" ({event.detail})" if event.detail else "")
            _change(history, event.episodes, fate=fate, failure=event.failed_by or "", over_ns=event.at_ns)
        case ev.GroupDropped():
            _change(history, event.episodes, fate=f"dropped: {event.reason}")
        case ev.EpisodesTaken():
            _change(history, event.episodes, fate="taken by its client")
        case ev.BatchReady():
            for group in event.groups:
                _change(history, [each.episode for each in group.episodes], fate="in a batch", step=event.step)


def _claimed(history: EngineHistory, event: ev.EpisodeClaimed) -> None:
    for episode in event.episodes:
        history.episodes[episode] = EpisodeRecord(
            episode=episode,
            task=event.task_hint,
            client=event.client,
            type=event.type,
            version=event.version,
            claimed_ns=event.at_ns,
        )
    trim(history.episodes, EPISODES_KEPT)


def _called(history: EngineHistory, event: ev.CallsNoted) -> None:
    for call in event.calls:
        record = history.episodes.get(call.episode)
        if record is not None:
            calls = (*record.calls[1 - CALLS_KEPT :], (event.at_ns, call))
            tokens = record.tokens + call.completion_tokens
            _change(history, [call.episode], calls=calls, tokens=tokens, calls_made=record.calls_made + 1)


def _change(history: EngineHistory, episodes: Iterable[str], **changes: Any) -> None:
    """Change what is kept of these episodes. Records are replaced, since copies of a view share them."""
    for episode in episodes:
        if (record := history.episodes.get(episode)) is not None:
            history.episodes[episode] = msgspec.structs.replace(record, **changes)


# ---- figures by step ----------------------------------------------------------------------------------------------


class StepPoint(msgspec.Struct, frozen=True, array_like=True):
    """The figures of a step, by the names that `step_metrics` gives them. The event at `position` completed it."""

    step: int
    position: int
    metrics: dict[str, float]


class StepCurves:
    """The figures by step of the newest runs of jobs, as all other pages show them.

    They belong to the log, not to a view of it: `until` returns those that were known at a position.
    """

    def __init__(self, hive: Hive | None = None) -> None:
        self._runs = Runs(hive or Hive())
        self._points: dict[str, deque[StepPoint]] = {}

    def note(self, position: int, event: Event) -> None:
        self._runs.note(position, cast(AnyEvent, event))
        if not isinstance(event, ev.StepCompleted):
            return
        name = f"{event.engine}-{event.run}"
        series = self._runs.series.get(name)
        if series is not None and series.steps and series.steps[-1].done_seq == position:
            row = series.steps[-1]
            points = self._points.setdefault(name, deque(maxlen=STEPS_KEPT))
            points.append(StepPoint(row.step, position, step_metrics(row)))
            trim(self._points, RUNS_KEPT)

    def until(self, position: int, engine: str, run: int) -> list[StepPoint]:
        return [point for point in self._points.get(f"{engine}-{run}", ()) if point.position <= position]
