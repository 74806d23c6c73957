"""What the screen draws from: the record of a log, as all pages show it, and the newest episodes and events.

Pure: no clock, no I/O, no widgets. Everything that grows has a limit.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.describe import KINDS, EventGroup, line_of, tone_of
from bombus.hive.events import AbortReason, AnyEvent, EpisodeType, Event
from bombus.hive.operations.state import FORWARD_BACKWARD, OPTIM_STEP
from bombus.hive.state import EngineState
from bombus.insight.record import Moment

TAIL_SHOWN = 200
SAMPLERS_KEPT = 4_096
STEPS_KEPT = 2_048
EPISODES_KEPT = 4_096
MODELS_KEPT = 64  # models whose operations are kept: the most recently trained


class TailLine(msgspec.Struct, array_like=True, frozen=True):
    """An event, as the tail of the log shows it."""

    position: int
    at_ns: int
    tone: EventGroup
    text: str


class EpisodeRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What is kept of an episode, open or over. `step` is the step whose batch it is in, or 0."""

    episode: str
    task: str
    client: str
    type: EpisodeType
    version: int
    claimed_ns: int
    over_ns: int = 0
    fate: str = "open"
    reward: float | None = None
    step: int = 0
    calls: int = 0
    tokens: int = 0


class RunHistory(msgspec.Struct):
    """What is kept of an engine's run beside its state and its figures.

    `episodes` has the newest, in the order in which they were claimed. `rewards` has the number of episodes and the sum
    of their rewards for each saved model that training clients sampled from. `lost` counts the episodes that were
    aborted or dropped, by what happened and why. `stages` are those of booting. `computed` has the operations by which
    clients trained each model, the newest model last.
    """

    episodes: dict[str, EpisodeRecord] = {}
    rewards: dict[str, tuple[int, float]] = {}
    lost: dict[tuple[str, str], int] = {}
    stages: list[ev.EngineProgressed] = []
    computed: dict[str, list[ev.OperationCompleted]] = {}

    def note(self, event: Event, engine: EngineState) -> None:
        """Note an event that is already folded into `engine`."""
        match event:
            case ev.EngineProgressed() | ev.OperationCompleted():
                self._worked(event)
            case ev.EpisodeClaimed():
                self._claimed(event)
            case ev.CallsNoted():
                self._called(event)
            case ev.EpisodeEnded():
                self._ended(event, engine)
            case ev.EpisodeAborted():
                fate = f"aborted: {event.reason}" + (f" ({event.detail})" if event.detail else "")
                self._change(event.episodes, fate=fate, over_ns=event.at_ns)
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

    def _worked(self, event: ev.EngineProgressed | ev.OperationCompleted) -> None:
        if isinstance(event, ev.EngineProgressed):
            self.stages.append(event)
            del self.stages[:-TAIL_SHOWN]
        elif event.op in (FORWARD_BACKWARD, OPTIM_STEP) and not event.failed:
            computed = self.computed[event.model] = self.computed.pop(event.model, [])
            computed.append(event)
            del computed[:-STEPS_KEPT]
            trim(self.computed, MODELS_KEPT)

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
                tokens = record.tokens + call.completion_tokens
                self._change([call.episode], calls=record.calls + 1, tokens=tokens)

    def _ended(self, event: ev.EpisodeEnded, engine: EngineState) -> None:
        for outcome in event.outcomes:
            found = {"task": outcome.task, "reward": outcome.reward}
            self._change([outcome.episode], fate="ended", over_ns=event.at_ns, **found)
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


class HiveView(Moment):
    """A hive at one position of its log, with the histories of its engines' runs, and the newest events of each group,
    so that few of a kind are not displaced by many."""

    histories: dict[str, RunHistory] = msgspec.field(default_factory=dict)
    tails: dict[tuple[str, EventGroup], list[TailLine]] = msgspec.field(default_factory=dict)

    def history(self, engine: str) -> RunHistory:
        return self.histories.get(engine) or RunHistory()

    def fold(self, position: int, event: AnyEvent, stored_ns: int) -> None:
        super().fold(position, event, stored_ns)
        if isinstance(event, ev.EngineStarted) or event.engine not in self.histories:
            self.histories[event.engine] = RunHistory()
        self.histories[event.engine].note(event, self.hive.engine(event.engine))
        line = TailLine(position, event.at_ns, tone_of(event), line_of(event))
        for group in {EventGroup.ALL, KINDS[type(event)].group, line.tone}:
            tail = self.tails.setdefault((event.engine, group), [])
            tail.append(line)
            del tail[:-TAIL_SHOWN]
