"""Given, when, then for the coordinator's core: a hive in memory whose clock is a number."""

from collections.abc import Iterator
from contextlib import contextmanager

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AnyEvent, Collection, EpisodeType, Event, Method, NotedCall, Weights
from bombus.hive.inbox import AnyAnswer, EpisodeResult
from bombus.hive.records import CallRef
from bombus.hive.state import EngineState, Phase
from bombus_coordinator.core import Core

PATIENCE_S = 1e7  # its trainers send no heartbeats, and are not what tests of the core are about
SECOND = 1_000_000_000
ENGINE = "main"


def without_ticks(core: Core) -> Core:
    """Return a core that expects no ticks: its time may jump, and deadlines run all the same."""
    core.live.ticked_ns = None
    return core


class CoreHarness:
    """A core, an inbox that counts, and a clock. `send` puts a message in and returns what was decided."""

    def __init__(self, core: Core | None = None) -> None:
        self.name = ENGINE  # the engine that messages are about
        self.core = without_ticks(core or Core())
        self.seq = 0
        self.now_ns = 1_000 * SECOND
        self.log: list[Event] = []
        self.answers: dict[str, AnyAnswer] = {}
        self.ids = 0
        if core is None:
            self.log += self.core.open_epoch("leader").events

    @contextmanager
    def on(self, engine: str) -> Iterator[EngineState]:
        """Send messages about another engine while the block runs."""
        before, self.name = self.name, engine
        try:
            yield self.engine
        finally:
            self.name = before

    @property
    def engine(self) -> EngineState:
        return self.core.hive.engine(self.name)

    def phase(self) -> Phase:
        return self.engine.phase

    def id(self) -> str:
        self.ids += 1
        return f"m{self.ids}"

    def send(self, message: inbox.AnyMessage, after_s: float = 0.0) -> list[AnyEvent]:
        self.now_ns += int(after_s * SECOND)
        self.seq += 1
        decided: list[AnyEvent] = []
        for each in [*self.core.receive(message, self.seq, self.now_ns), *self.core.flush()]:
            decided += each.decision.events  # type: ignore[arg-type]
            for reply in each.decision.replies:
                self.answers[reply.command] = reply.answer  # type: ignore[assignment]
        self.log += decided
        return decided

    def request(self, message: inbox.AnyMessage, after_s: float = 0.0) -> AnyAnswer:
        self.send(message, after_s)
        return self.answers[message.id]

    def tick(self, after_s: float = 1.0) -> list[AnyEvent]:
        return self.send(inbox.Tick(id=self.id()), after_s)

    # ---- the usual sequences ----

    def boot(
        self, method: Method = Method.ENOUGH_TASKS, batch_size: int = 2, num_repeat: int = 2, **rules: object
    ) -> None:
        collection = Collection(method=method, batch_size=batch_size, num_repeat=num_repeat, **rules)  # type: ignore[arg-type]
        self.configure(collection)
        self.send(inbox.Start(id=self.id(), engine=self.name))
        self.send(inbox.ReplicaAlive(id=self.id(), engine=self.name, replica="r1", url="http://r1"))
        self.open_trainer()
        self.save_weights(0)
        self.load(0)
        assert self.engine.phase == Phase.ROLLING

    def configure(self, collection: Collection) -> AnyAnswer:
        return self.request(
            inbox.Configure(
                id=self.id(), engine=self.name, config="{}", config_digest="d", collection=collection, model="tiny"
            )
        )

    def open_trainer(self) -> int:
        opens = inbox.TrainerOpens(
            id=self.id(), engine=self.name, run=self.engine.run, trainer="t1", patience_s=PATIENCE_S
        )
        answer = self.request(opens)
        assert isinstance(answer, inbox.Done)
        return answer.epoch

    def save_weights(self, step: int, epoch: int | None = None) -> list[AnyEvent]:
        return self.send(
            inbox.WeightsSaved(
                id=self.id(),
                engine=self.name,
                run=self.engine.run,
                step=step,
                trainer_epoch=self.engine.trainer_epoch if epoch is None else epoch,
                weights=Weights(where=f"/weights/{step}"),
            )
        )

    def load(self, version: int, replica: str = "r1") -> list[AnyEvent]:
        return self.send(
            inbox.WeightsLoadedFact(
                id=self.id(), engine=self.name, run=self.engine.run, version=version, replica=replica
            )
        )

    def claim_message(self, client: str = "c1", count: int = 1, claim: str = "", **more: object) -> inbox.Claim:
        message_id = self.id()
        return inbox.Claim(
            id=message_id,
            engine=self.name,
            claim=claim or f"claim-{message_id}",
            client=client,
            count=count,
            **more,  # type: ignore[arg-type]
        )

    def claim(self, client: str = "c1", count: int = 1, **more: object) -> tuple[str, ...]:
        answer = self.request(self.claim_message(client, count, **more))  # type: ignore[arg-type]
        assert isinstance(answer, inbox.Granted), answer
        return answer.episodes

    def call(self, episode: str, version: int | None = None, name: str = "") -> list[AnyEvent]:
        made = self.engine.version if version is None else version
        noted = NotedCall(
            episode=episode,
            ref=CallRef(self.seq, name or self.id(), b"d" * 16),
            prompt_tokens=5,
            completion_tokens=3,
            oldest=made,
            newest=made,
        )
        return self.send(inbox.CallRecorded(id=self.id(), engine=self.name, run=self.engine.run, call=noted))

    def end_message(
        self, episode: str, task: str = "t1", reward: float | None = 1.0, client: str = "c1", **more: object
    ) -> inbox.End:
        result = EpisodeResult(episode=episode, task=task, reward=reward, **more)  # type: ignore[arg-type]
        return inbox.End(id=self.id(), engine=self.name, client=client, results=(result,))

    def end(
        self, episode: str, task: str = "t1", reward: float | None = 1.0, client: str = "c1", **more: object
    ) -> AnyAnswer:
        return self.request(self.end_message(episode, task, reward, client, **more))

    def play(self, task: str, reward: float = 1.0, client: str = "c1", type: EpisodeType = EpisodeType.TRAIN) -> str:
        """Claim an episode, record one call, end it."""
        (episode,) = self.claim(client, type=type)
        self.call(episode)
        answer = self.end(episode, task, reward, client)
        assert isinstance(answer, inbox.Done), answer
        return episode

    def step_done(self, step: int, epoch: int | None = None, digest: str = "c", saved: bool = True) -> list[AnyEvent]:
        return self.send(
            inbox.StepDone(
                id=self.id(),
                engine=self.name,
                run=self.engine.run,
                step=step,
                trainer_epoch=self.engine.trainer_epoch if epoch is None else epoch,
                checkpoint=f"/checkpoints/{step}" if saved else "",
                checkpoint_digest=digest,
            )
        )

    def train(self, saved: bool = True) -> None:
        """Make the outstanding batch the next policy version on all replicas, with a checkpoint if it is `saved`."""
        step = self.engine.step
        self.step_done(step, saved=saved)
        self.save_weights(step)
        for replica in list(self.engine.replicas):
            self.load(step, replica)

    def kinds(self) -> list[str]:
        return [ev.kind_of(event) for event in self.log]
