"""Given, when, then for training operations: a client, a trainer and the core, without a bus."""

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AnyEvent, Collection, ModelShape, OperationLimits, SavedWeights
from bombus.hive.inbox import AnyAnswer
from bombus.hive.operations.state import ClientModel, Queued, TrainingClients
from bombus.hive.records import BodyRef, digest
from bombus.hive.state import Phase
from tests.coordinator.core_in_memory import ENGINE, CoreHarness

SESSION, MODEL, BASE = "s", "s:train:0", "tiny"


class OperationHarness(CoreHarness):
    """A core with a client of training operations. What it stores takes the next sequences of `ops`."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = 0

    @property
    def clients(self) -> TrainingClients:
        return self.engine.clients

    @property
    def model(self) -> ClientModel:
        return self.clients.models[MODEL]

    def op(self, key: str, model: str = MODEL) -> Queued:
        return self.clients.models[model].operations[key]

    def body(self, text: str = "body", size: int = 100) -> BodyRef:
        self.stored += 1
        return BodyRef(seqs=(self.stored,), size=size, digest=digest(text.encode()))

    def limits(self, **limits: object) -> None:
        """Configure the engine with these limits."""
        assert isinstance(self.configure(Collection(operations=OperationLimits(**limits))), inbox.Done)  # type: ignore[arg-type]

    def open_session(self, session: str = SESSION, **more: object) -> AnyAnswer:
        return self.request(inbox.OpenSession(id=self.id(), engine=ENGINE, session=session, **more))  # type: ignore[arg-type]

    def close_session(self, session: str = SESSION, **more: object) -> AnyAnswer:
        return self.request(inbox.CloseSession(id=self.id(), engine=ENGINE, session=session, **more))  # type: ignore[arg-type]

    def operate_message(
        self, key: str, op: str = "forward_backward", model: str = MODEL, text: str = "", **more: object
    ) -> inbox.Operate:
        given = {"session": SESSION, "body": self.body(text or f"{model}{key}{op}"), **more}
        return inbox.Operate(id=self.id(), engine=ENGINE, model=model, key=key, op=op, **given)  # type: ignore[arg-type]

    def operate(
        self, key: str, op: str = "forward_backward", model: str = MODEL, text: str = "", **more: object
    ) -> AnyAnswer:
        return self.request(self.operate_message(key, op, model, text, **more))

    def create(self, model: str = MODEL, session: str = SESSION, base: str = BASE) -> AnyAnswer:
        return self.operate("0", "create_model", model, session=session, base=base)

    def serve(self) -> None:
        """Open a trainer, which has loaded the base."""
        epoch = self.open_trainer()
        self.send(inbox.TrainerServes(id=self.id(), engine=ENGINE, run=self.engine.run, trainer_epoch=epoch))

    def done_message(self, key: str, model: str = MODEL, **more: object) -> inbox.OperationDone:
        given = {
            "run": self.engine.run,
            "trainer_epoch": self.engine.trainer_epoch,
            "number": self.op(key, model).number,
            "result": self.body(f"result of {key}"),
            **more,
        }
        return inbox.OperationDone(id=self.id(), engine=ENGINE, model=model, key=key, **given)  # type: ignore[arg-type]

    def done(self, key: str, model: str = MODEL, **more: object) -> list[AnyEvent]:
        return self.send(self.done_message(key, model, **more))

    def checkpoint(self, number: int, model: str = MODEL, trainer_epoch: int | None = None) -> list[AnyEvent]:
        written = inbox.CheckpointWritten(
            id=self.id(),
            engine=ENGINE,
            run=self.engine.run,
            trainer_epoch=self.engine.trainer_epoch if trainer_epoch is None else trainer_epoch,
            model=model,
            number=number,
            folder=f"/recovery/{number}",
            digest="c",
        )
        return self.send(written)

    def serving(self) -> "OperationHarness":
        """Open a session and a model, and let a trainer make it."""
        self.open_session()
        self.create()
        self.serve()
        self.done("0", made=ModelShape(adapter=ev.AdapterShape(rank=8, alpha=16.0), parameters=1000))
        assert self.phase() == Phase.ROLLING
        return self

    def touch(self, session: str = SESSION, after_s: float = 0.0) -> None:
        self.send(inbox.Touch(id=self.id(), engine=ENGINE, sessions=(session,)), after_s)


def saved(name: str, use: str = "training", ttl_s: float = 0.0) -> SavedWeights:
    return SavedWeights(use=use, name=name, folder=f"/weights/{name}", address="aa", size_bytes=7, ttl_s=ttl_s)
