"""The facts of one engine by name, as the log of a hive has them."""

from collections import Counter
from collections.abc import Sequence

from bombus.hive import events as ev
from bombus.hive.events import AnyEvent, BatchEpisode, NotedCall, Outcome


class EngineLog:
    """What a hive's events say of one engine. Batches have their calls, as the fold adds them.

    `stops` has the reason of each run that ended or had to wait for its operator, `pauses` that of each wait for a
    replica.
    """

    def __init__(self, engine: str, events: Sequence[AnyEvent]) -> None:
        self.noted: dict[str, list[NotedCall]] = {}
        self.ended: dict[str, list[Outcome]] = {}
        self.evaluated: set[str] = set()
        self.claimed: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        self.batched: dict[str, list[BatchEpisode]] = {}
        self.dropped: set[str] = set()
        self.batches: dict[int, list[ev.BatchReady]] = {}
        self.steps: dict[int, list[ev.StepCompleted]] = {}
        self.weights: dict[int, list[ev.WeightsReady]] = {}
        self.stops: list[str] = []
        self.pauses: list[str] = []
        self.quarantined: set[str] = set()  # replicas
        for event in events:
            if event.engine == engine:
                self._apply(event)

    @property
    def trained(self) -> set[str]:
        """Return the episodes of the batches whose steps were completed."""
        return {
            episode.episode
            for step, batches in self.batches.items()
            if step in self.steps
            for batch in batches
            for group in batch.groups
            for episode in group.episodes
        }

    def _apply(self, event: AnyEvent) -> None:
        match event:
            case ev.CallsNoted():
                for call in event.calls:
                    self.noted.setdefault(call.ref.id, []).append(call)
            case ev.EpisodeClaimed():
                self.claimed.update(event.episodes)
            case ev.EpisodeEnded():
                for outcome in event.outcomes:
                    self.ended.setdefault(outcome.episode, []).append(outcome)
                    if event.type == ev.EpisodeType.EVAL:
                        self.evaluated.add(outcome.episode)
            case ev.EpisodeAborted():
                self.aborted.update(event.episodes)
            case _:
                self._apply_training(event)

    def _apply_training(self, event: AnyEvent) -> None:
        match event:
            case ev.GroupDropped():
                self.dropped.update(event.episodes)
            case ev.BatchReady():
                self.batches.setdefault(event.step, []).append(event)
                for group in event.groups:
                    for episode in group.episodes:
                        self.batched.setdefault(episode.episode, []).append(episode)
            case ev.StepCompleted():
                self.steps.setdefault(event.step, []).append(event)
            case ev.WeightsReady():
                self.weights.setdefault(event.version, []).append(event)
            case _:
                self._apply_trouble(event)

    def _apply_trouble(self, event: AnyEvent) -> None:
        match event:
            case ev.EngineStopped():
                self.stops.append("it was stopped")
            case ev.EngineFailed():
                self.stops.append(event.reason)
            case ev.EngineSuspended():
                (self.pauses if event.until_served else self.stops).append(event.reason)
            case ev.ReplicaQuarantined():
                self.quarantined.add(event.replica)
            case _:
                pass
