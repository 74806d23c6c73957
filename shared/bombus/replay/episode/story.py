"""The story of one episode: its events, collected while a log is folded."""

from contextlib import aclosing

import msgspec

from bombus.hive import events as ev
from bombus.hive.events import AnyEvent, NotedCall, Outcome
from bombus.hive.fold.evolve import as_folded, evolve, with_calls
from bombus.hive.records import CallRef
from bombus.hive.state import Episode, Hive
from bombus.replay.source import Logged, Source, no_episode


class EpisodeStory(msgspec.Struct, kw_only=True):
    """An episode and what became of it. Times are nanoseconds since the epoch.

    `fate` is a clause on what happened to the episode after it ended. `sampler` is set only in a run of training
    operations: it is the weights that the episode played with.
    """

    id: str
    engine: str
    run: int
    client: str
    type: ev.EpisodeType
    task: str
    version: int  # policy version when the episode was claimed
    claimed_ns: int
    over_ns: int = 0
    outcome: Outcome | None = None
    aborted: ev.EpisodeAborted | None = None
    fate: str = ""
    step: int = 0  # the step that trained on it
    group: ev.BatchGroup | None = None
    calls: dict[CallRef, NotedCall] = {}  # in the order in which they were noted
    config: ev.EngineConfigured | None = None
    tokenizer: str = ""
    sampler: ev.SamplerWeights | None = None

    def belongs(self, ref: CallRef) -> bool:
        """Return whether a call is one of those with which the episode ended (R7).

        If the episode has no outcome, return whether the call came in time.
        """
        if self.outcome is not None:
            return ref in self.outcome.calls
        noted = self.calls.get(ref)
        return noted is not None and not noted.late


async def read_story(
    source: Source, episode: str, start: tuple[Hive, int] | None = None, until: int | None = None
) -> EpisodeStory:
    """Read the log for one episode, up to event `until` or to the event after which nothing happens to the episode.

    `start` is a state from before the episode's claim, with its position; the state is changed. By default the log is
    read from its beginning. Raises `NotOnLog` if the log does not have the episode.
    """
    hive, position = await source.base() if start is None else start
    reader = _StoryReader(episode, hive)
    async with aclosing(source.events(position, until)) as entries:
        async for entry in entries:
            reader.take(entry)
            if start is not None and reader.is_over:
                break
    return reader.story(source)


class _StoryReader:
    def __init__(self, episode: str, hive: Hive) -> None:
        self._id = episode
        self._hive = hive
        self._story: EpisodeStory | None = None
        for name in hive.engines:  # on a compacted log, an open episode may have been claimed before the log's base
            self._begin(name)

    def take(self, entry: Logged) -> None:
        event = entry.event
        before = self._hive.engines.get(event.engine)
        was_in_pool = before is not None and self._id in before.pool
        if isinstance(event, ev.EpisodeEnded):
            event = with_calls(self._hive, event)
        evolve(self._hive, event)
        if isinstance(event, ev.EpisodeClaimed) and self._id in event.episodes:
            self._begin(event.engine)
        story = self._story
        if story is None or story.engine != event.engine:
            return
        self._note(story, event)
        engine = self._hive.engines[event.engine]
        if was_in_pool and self._id not in engine.pool:
            _left_the_pool(story, as_folded(self._hive, event), entry.seq)

    @property
    def is_over(self) -> bool:
        """Return whether the episode was trained, dropped or aborted, or was an evaluation episode and has ended."""
        story = self._story
        if story is None:
            return False
        measured = story.outcome is not None and story.type == ev.EpisodeType.EVAL
        return bool(story.fate) or story.aborted is not None or measured

    def story(self, source: Source) -> EpisodeStory:
        if (story := self._story) is None:
            raise no_episode(source, self._id)
        if story.outcome is not None and not story.fate:
            in_pool = self._id in self._hive.engines[story.engine].pool
            played = "its policy version" if story.sampler is None else "what it played with"
            story.fate = "waits in the pool" if in_pool else f"measured {played}, and was not trained on"
        return story

    def _begin(self, name: str) -> None:
        engine = self._hive.engines[name]
        found: Episode | None = engine.open.get(self._id)
        if found is None:
            return
        self._story = EpisodeStory(
            id=found.id,
            engine=name,
            run=engine.run,
            client=found.client,
            type=found.type,
            task=found.task_hint,
            version=found.version,
            claimed_ns=found.claimed_ns,
            calls={call.ref: call for call in found.calls},
            config=engine.active,
            tokenizer=engine.weights.weights.tokenizer if engine.weights is not None else "",
            sampler=found.sampler,
        )

    def _note(self, story: EpisodeStory, event: AnyEvent) -> None:
        match event:
            case ev.CallsNoted():
                story.calls |= {call.ref: call for call in event.calls if call.episode == self._id}
            case ev.EpisodeEnded():
                for outcome in event.outcomes:
                    if outcome.episode == self._id:
                        story.outcome, story.task, story.over_ns = outcome, outcome.task, event.at_ns
            case ev.WeightsReady() if not story.tokenizer and event.run == story.run:
                story.tokenizer = event.weights.tokenizer
            case ev.EpisodeAborted() if self._id in event.episodes:
                story.aborted, story.over_ns = event, event.at_ns


def _left_the_pool(story: EpisodeStory, event: AnyEvent, seq: int) -> None:
    match event:
        case ev.BatchReady():
            story.step = event.step
            story.group = next(
                group for group in event.groups if any(member.episode == story.id for member in group.episodes)
            )
            story.fate = f"trained in step {event.step} (event {seq})"
        case ev.EpisodesTaken():
            story.fate = f"taken by its client (event {seq})"
        case ev.GroupDropped() | ev.PoolCleared():
            story.fate = f"dropped untrained: {event.reason} (event {seq})"
        case _:
            story.fate = f"left the pool untrained when its run ended (event {seq})"
