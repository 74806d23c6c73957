"""What the screen draws from: the record of a log, as all pages show it, and the newest episodes and events.

Pure: no clock, no I/O, no widgets. Everything that grows has a limit.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.describe import KINDS, EventGroup
from bombus.hive.events import AbortReason, AnyEvent, EpisodeType, Event, NotedCall
from bombus.hive.operations.state import FORWARD_BACKWARD, OPTIM_STEP
from bombus.hive.state import EngineState, Hive
from bombus.insight.metrics import step_metrics
from bombus.insight.record import Moment, Record

FRAME_EVENTS = 1_000
FRAMES_KEPT = 6  # enough that at least the newest 5,000 events can be shown again
SAMPLERS_KEPT = 4_096
STEPS_KEPT = 4_096
EPISODES_KEPT = 4_096
CALLS_KEPT = 64  # the newest of each episode
MODELS_KEPT = 64  # models whose operations are kept: the most recently trained


class LoggedEvent(NamedTuple):
    """An event and its position on the log."""

    position: int
    event: Event


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


class RunHistory(NamedTuple):
    """What is kept of an engine's run beside its state and its figures. The values cannot change: copies share them.

    `episodes` has the newest, in the order in which they were claimed. `rewards` has the number of episodes and the sum
    of their rewards for each saved model that training clients sampled from. `lost` counts the episodes that were
    aborted or dropped, by what happened and why.
    """

    episodes: dict[str, EpisodeRecord]
    rewards: dict[str, tuple[int, float]]
    lost: dict[tuple[str, str], int]

    def note(self, event: Event, engine: EngineState) -> None:
        """Note an event that is already folded into `engine`."""
        match event:
            case ev.EpisodeClaimed():
                self._claimed(event)
            case ev.CallsNoted():
                self._called(event)
            case ev.EpisodeEnded():
                self._ended(event, engine)
            case ev.EpisodeAborted():
                fate = f"aborted: {event.reason}" + (f" ({event.detail})" if event.detail else "")
                self._change(event.episodes, fate=fate, failure=event.failed_by or "", over_ns=event.at_ns)
                by_client = event.reason == AbortReason.CLIENT
                self._lose("aborted", event.failure or ("by its client" if by_client else event.reason), event.episodes)
            case ev.GroupDropped():
                self._change(event.episodes, fate=f"dropped: {event.reason}")
                self._lose("dropped", event.reason, event.episodes)
            case ev.PoolCleared():
                self._lose("dropped", event.reason, range(event.episodes))
            case ev.EpisodesTaken():
                self._change(event.episodes, fate="taken by its client")
            case ev.BatchReady():
                episodes = (each.episode for group in event.groups for each in group.episodes)
                self._change(episodes, fate="in a batch", step=event.step)

    def _claimed(self, event: ev.EpisodeClaimed) -> None:
        for episode in event.episodes:
            self.episodes[episode] = EpisodeRecord(
                episode=episode,
                task=event.task_hint,
                client=event.client,
                type=event.type,
                version=event.version,
                claimed_ns=event.at_ns,
            )
        trim(self.episodes, EPISODES_KEPT)

    def _called(self, event: ev.CallsNoted) -> None:
        for call in event.calls:
            if (record := self.episodes.get(call.episode)) is not None:
                calls = (*record.calls[1 - CALLS_KEPT :], (event.at_ns, call))
                tokens = record.tokens + call.completion_tokens
                self._change([call.episode], calls=calls, tokens=tokens, calls_made=record.calls_made + 1)

    def _ended(self, event: ev.EpisodeEnded, engine: EngineState) -> None:
        for outcome in event.outcomes:
            found = {"task": outcome.task, "reward": outcome.reward, "is_success": outcome.is_success}
            failure = outcome.failure or ""
            self._change([outcome.episode], fate="ended", over_ns=event.at_ns, failure=failure, **found)
            completed = engine.pool.get(outcome.episode)
            if completed is not None and engine.clients_take_episodes and event.type != EpisodeType.EVAL:
                count, total = self.rewards.get(completed.sampler, (0, 0.0))
                self.rewards[completed.sampler] = count + 1, total + outcome.reward
        trim(self.rewards, SAMPLERS_KEPT)

    def _change(self, episodes: Iterable[str], **changes: Any) -> None:
        for episode in episodes:
            if (record := self.episodes.get(episode)) is not None:
                self.episodes[episode] = msgspec.structs.replace(record, **changes)

    def _lose(self, what: str, why: str, episodes: Sequence[object]) -> None:
        self.lost[what, str(why)] = self.lost.get((what, str(why)), 0) + len(episodes)


class HiveView:
    """A hive at one position of its log, and the histories of its engines' runs, which are copied."""

    def __init__(self, moment: Moment, histories: dict[str, RunHistory]) -> None:
        self.moment = moment
        self.histories = _copied(histories)

    def history(self, engine: str) -> RunHistory:
        return self.histories.setdefault(engine, RunHistory({}, {}, {}))

    def note(self, event: Event) -> None:
        """Note an event that is already folded into `moment`."""
        if isinstance(event, ev.EngineStarted):
            self.histories.pop(event.engine, None)
        self.history(event.engine).note(event, self.moment.hive.engine(event.engine))


def _copied(histories: dict[str, RunHistory]) -> dict[str, RunHistory]:
    return {
        engine: RunHistory(each.episodes.copy(), each.rewards.copy(), each.lost.copy())
        for engine, each in histories.items()
    }


class Timeline:
    """A log, folded: its `record`, the view after its newest event as `live`, and what going back in time needs.

    `at` returns the view at an earlier position, folded from the nearest frame: a copy of the view that is kept every
    `frame_events` events. What belongs to the log rather than to a view, each method returns up to a position.
    """

    def __init__(
        self,
        hive: Hive | None = None,
        position: int = 0,
        frame_events: int = FRAME_EVENTS,
        frames_kept: int = FRAMES_KEPT,
    ) -> None:
        self.record = Record(hive or Hive(), position)
        self.live = HiveView(self.record.live, {})
        self._frame_events = frame_events
        self._frames: deque[tuple[int, bytes, dict[str, RunHistory]]] = deque(maxlen=frames_kept)
        self._events: deque[LoggedEvent] = deque(maxlen=frame_events * frames_kept)
        self._tails: dict[tuple[str, EventGroup], deque[LoggedEvent]] = {}  # few of a kind are not displaced by many
        self._computed: dict[
            tuple[str, int, str], deque[tuple[int, ev.OperationCompleted]]
        ] = {}  # by engine, run and model
        self._metrics: dict[int, dict[str, float]] = {}  # of steps, by `done_seq`
        self._folded = 0

    def fold(self, position: int, event: Event) -> None:
        if not self._folded % self._frame_events:
            self._frames.append((self.newest, self.record.live.encode(), _copied(self.live.histories)))
        self._folded += 1
        self.record.fold(position, cast(AnyEvent, event), event.at_ns)
        self.live.note(event)
        self._keep(LoggedEvent(position, event))

    def _keep(self, logged: LoggedEvent) -> None:
        event, kind = logged.event, KINDS[type(logged.event)]
        self._events.append(logged)
        groups = {EventGroup.ALL, kind.group} | ({EventGroup.TROUBLE} if kind.trouble else set())
        for group in groups:
            self._tails.setdefault((event.engine, group), deque(maxlen=self._events.maxlen)).append(logged)
        if isinstance(event, ev.OperationCompleted) and event.op in (FORWARD_BACKWARD, OPTIM_STEP) and not event.failed:
            key = event.engine, event.run, event.model
            computed = self._computed[key] = self._computed.pop(key, deque(maxlen=STEPS_KEPT))
            computed.append((logged.position, event))
            trim(self._computed, MODELS_KEPT)

    @property
    def oldest(self) -> int:
        """The earliest position that can be shown."""
        return self._frames[0][0] if self._frames else self.newest

    @property
    def newest(self) -> int:
        return self.record.live.position

    def moved(self, position: int, events: int) -> int:
        """Return the position `events` events later (earlier if negative), limited to the events that are kept."""
        positions = [self.oldest, *(each.position for each in self._events if each.position > self.oldest)]
        index = bisect_left(positions, position) + events
        return positions[min(max(index, 0), len(positions) - 1)]

    def at(self, position: int) -> HiveView:
        """Return a new view with all events up to `position`, which is limited to `oldest`."""
        frames = [frame for frame in self._frames if frame[0] <= position] or [*self._frames][:1]
        if not frames:
            return self.live
        start, moment, histories = frames[-1]
        view = HiveView(Moment.decode(moment), histories)
        for seq, event in self._events:
            if start < seq <= position:
                view.moment.fold(seq, cast(AnyEvent, event), event.at_ns)
                view.note(event)
        return view

    # ---- up to a position -----------------------------------------------------------------------------------------

    def tail(self, engine: str, group: EventGroup, position: int) -> Iterator[LoggedEvent]:
        """Yield the events of an engine up to a position, the newest first."""
        return (each for each in reversed(self._tails.get((engine, group), ())) if each.position <= position)

    def steps(self, engine: str, run: int, position: int) -> list[tuple[int, dict[str, float]]]:
        """Return each step that a run of a job had completed, with its figures as all pages show them."""
        series = self.record.runs.series.get(f"{engine}-{run}")
        rows = [row for row in series.steps if row.done_seq <= position] if series is not None else []
        for row in rows:
            if row.done_seq not in self._metrics:
                self._metrics[row.done_seq] = step_metrics(row)
        found = [(row.step, self._metrics[row.done_seq]) for row in rows]
        trim(self._metrics, 2 * STEPS_KEPT)
        return found

    def computed(self, engine: str, run: int, position: int) -> dict[str, list[ev.OperationCompleted]]:
        """Return the operations by which clients have trained each model of a run, the newest model last."""
        found: dict[str, list[tuple[int, ev.OperationCompleted]]] = {}
        for (name, number, model), kept in self._computed.items():
            known = [each for each in kept if each[0] <= position] if (name, number) == (engine, run) else []
            if known:
                found[model] = known
        newest_last = sorted(found.items(), key=lambda item: item[1][-1][0])
        return {model: [event for _, event in known] for model, known in newest_last}
