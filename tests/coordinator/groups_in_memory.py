"""The coordinator's core with an outside trainer and environments of rollout groups, in memory."""

from bombus.hive import inbox
from bombus.hive.events import AnyEvent
from bombus.hive.inbox import AnyAnswer, BatchTaken, Joined
from bombus.hive.records import BodyRef, digest
from bombus.hive.trajectories.queue import QueuedGroup
from bombus.hive.trajectories.state import Trajectories
from tests.coordinator.core_in_memory import ENGINE, CoreHarness


class GroupHarness(CoreHarness):
    """A core with an outside trainer and environments. What they store takes the next sequences of `trajectories`."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = 0

    @property
    def trajectories(self) -> Trajectories:
        return self.engine.trajectories

    def register(self, batch_size: int = 4, **more: object) -> AnyAnswer:
        given = {"max_token_len": 512, "checkpoint_dir": "/tmp/a", "save_checkpoint_interval": 5, "starting_step": 0}
        given |= {"trainer": "7", "num_steps": 10, **more}
        message = inbox.RegisterTrainer(id=self.id(), engine=ENGINE, batch_size=batch_size, **given)  # type: ignore[arg-type]
        return self.request(message)

    def ask(self, after: int | None = None) -> int:
        """Ask for a batch, and return its number, 0 for none."""
        answer = self.request(inbox.TakeBatch(id=self.id(), engine=ENGINE, after=after))
        assert isinstance(answer, BatchTaken), answer
        return answer.number

    def arrived(self, number: int) -> list[AnyEvent]:
        return self.send(inbox.BatchSent(id=self.id(), engine=ENGINE, run=self.engine.run, number=number))

    def join(self, name: str = "gsm", group_size: int = 2, minimum: float | None = None) -> int | None:
        answer = self.request(
            inbox.JoinEnvironment(
                id=self.id(), engine=ENGINE, desired_name=name, max_tokens=512, weight=1.0, group_size=group_size,
                minimum=minimum,
            )
        )  # fmt: skip
        assert isinstance(answer, Joined), answer
        return answer.environment

    def group(self, environment: int | None = None, sequences: int = 2, holder: str = "") -> QueuedGroup:
        self.stored += 1
        body = BodyRef(seqs=(self.stored,), size=100, digest=digest(str(self.stored).encode()))
        return QueuedGroup(environment, sequences, tokens=20, longest=10, body=body, holder=holder)

    def push(self, *groups: QueuedGroup, key: str = "") -> AnyAnswer:
        return self.request(inbox.PushGroups(id=self.id(), engine=ENGINE, groups=groups, key=key))

    def touch(self, environment: int) -> None:
        self.send(inbox.Touch(id=self.id(), engine=ENGINE, environments=(environment,)))

    def let_pass(self, seconds: float, touching: int | None = None) -> list[AnyEvent]:
        """Let time pass in ticks of a second."""
        decided: list[AnyEvent] = []
        for _ in range(int(seconds)):
            if touching is not None:
                self.touch(touching)
            decided += self.tick()
        return decided
