"""A hive in memory whose multi-model episodes play on several engines."""

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AnyEvent, EpisodeType
from bombus.hive.inbox import AnyAnswer, EpisodeResult, MultiModelClaim, MultiModelGranted
from bombus_coordinator.core import Core
from tests.coordinator.core_in_memory import CoreHarness

BIG, SMALL, THIRD = "big", "small", "third"

Episodes = dict[str, str]  # the episodes of a multi-model episode, by engine


class MultiModelHarness(CoreHarness):
    """Two engines that roll, or those that are named. Unless told otherwise, nothing makes a batch of theirs."""

    def __init__(self, *engines: str, core: Core | None = None, **rules: object) -> None:
        super().__init__(core)
        self.engines = engines or (BIG, SMALL)
        for name in self.engines if core is None else ():
            with self.on(name):
                self.boot(**({"batch_size": 1000} | rules))  # type: ignore[arg-type]

    def multi_model_message(
        self, *engines: str, client: str = "c1", count: int = 1, claim: str = "", **more: object
    ) -> MultiModelClaim:
        message_id = self.id()
        return MultiModelClaim(
            id=message_id,
            claim=claim or f"claim-{message_id}",
            client=client,
            count=count,
            engines=engines or self.engines,
            **more,  # type: ignore[arg-type]
        )

    def claim_multi_model(self, *engines: str, **more: object) -> list[Episodes]:
        answer = self.request(self.multi_model_message(*engines, **more))  # type: ignore[arg-type]
        assert isinstance(answer, MultiModelGranted), answer
        return multi_models_of(answer)

    def multi_model_end(
        self, *several: Episodes, client: str = "c1", reward: float = 1.0, task: str = "t1"
    ) -> inbox.MultiModelEnd:
        results = tuple(
            {engine: EpisodeResult(episode=episode, task=task, reward=reward) for engine, episode in multi.items()}
            for multi in several
        )
        return inbox.MultiModelEnd(id=self.id(), client=client, results=results)

    def end_multi_model(self, *several: Episodes, client: str = "c1", reward: float = 1.0) -> AnyAnswer:
        return self.request(self.multi_model_end(*several, client=client, reward=reward))

    def abort(self, engine: str, *episodes: str, client: str = "c1", infra: bool = False) -> list[AnyEvent]:
        return self.send(inbox.Abort(id=self.id(), engine=engine, client=client, episodes=tuple(episodes), infra=infra))

    def claim_on(self, engine: str, client: str = "c1", count: int = 1, **more: object) -> tuple[str, ...]:
        with self.on(engine):
            return self.claim(client, count, **more)

    def open(self) -> dict[str, list[str]]:
        return {name: list(self.core.hive.engine(name).open) for name in self.engines}

    def stop(self, engine: str) -> list[AnyEvent]:
        return self.send(inbox.Stop(id=self.id(), engine=engine))

    def play_eval(self, engine: str, client: str = "c1") -> tuple[str, ...]:
        return self.claim_on(engine, client, type=EpisodeType.EVAL)

    def was_granted(self, message: inbox.Claim) -> bool:
        return isinstance(self.answers.get(message.id), inbox.Granted | MultiModelGranted)


def multi_models_of(granted: MultiModelGranted) -> list[Episodes]:
    """Return the multi-model episodes of a grant."""
    count = len(granted.grants[0].episodes)
    return [{each.engine: each.episodes[number] for each in granted.grants} for number in range(count)]


def told(events: list[AnyEvent]) -> list[tuple[str, str]]:
    """Return the kind and the engine of each event."""
    return [(ev.kind_of(event), event.engine) for event in events]
