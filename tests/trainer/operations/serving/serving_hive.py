"""A hive that serves training operations, and a client of it: what the tests of a run of operations share."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bombus.bus import Bus
from bombus.bus.large.parts import Parts
from bombus.hive import inbox
from bombus.hive.operations.state import ClientModel, Queued
from bombus.operations import (
    AdapterSpec,
    CheckpointKind,
    CreateModel,
    EndModel,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    Rejected,
    Result,
    SaveWeights,
    decode_result,
    encode_operation,
)
from tests.trainer.operations.small_models import forward_backward, optim_step, random_data
from tests.trainer.trainer_hive import ENGINE, WAIT_S, Stage, staged

BASE = ENGINE  # as clients know it; the job has a path
SMALL, LARGE = AdapterSpec(rank=4, alpha=8.0, seed=1), AdapterSpec(rank=16, alpha=16.0, seed=2)

OPS = {
    CreateModel: "create_model",
    ForwardBackward: "forward_backward",
    OptimStep: "optim_step",
    SaveWeights: "save_weights",
    LoadWeights: "load_weights",
    EndModel: "end_model",
    Rejected: "forward_backward",
}


class TrainingClient:
    """A session with its models. Its operations are numbered: that is their key."""

    def __init__(self, stage: Stage, session: str = "s") -> None:
        self.stage = stage
        self.session = session
        self._keys: dict[str, int] = {}

    async def open(self) -> None:
        await self.stage.bus.inbox.request(inbox.OpenSession(id=self.stage.id(), engine=ENGINE, session=self.session))

    async def send(self, model: str, operation: Operation, key: str = "", reads: str = "") -> str:
        """Let an operation be accepted, and return its key."""
        return await self.send_body(model, OPS[type(operation)], encode_operation(operation), operation, key, reads)

    async def send_body(
        self, model: str, op: str, body: bytes, operation: Operation | None = None, key: str = "", reads: str = ""
    ) -> str:
        bus = self.stage.bus
        if not key:
            key = str(self._keys.get(model, 0))
            self._keys[model] = int(key) + 1
        ref = await Parts(bus).store(bus.subjects.operation(ENGINE, model), body)
        operate = inbox.Operate(
            id=self.stage.id(),
            engine=ENGINE,
            session=self.session,
            model=model,
            key=key,
            op=op,
            body=ref,
            base=BASE if op == "create_model" else "",
            passive=isinstance(operation, ForwardBackward) and operation.forward_only,
            reads=reads,
        )
        answer = await bus.inbox.request(operate)
        await self.stage.follower.wait_position(answer.position)
        return key

    async def result(self, model: str, key: str) -> Result:
        """Wait for an operation's result."""
        await self.stage.follower.wait_for(lambda _: not self.queued(model, key).waits, WAIT_S)
        queued = self.queued(model, key)
        assert queued.result is not None, queued.error
        return decode_result(await Parts(self.stage.bus).fetch(queued.result))

    async def do(self, model: str, operation: Operation) -> Result:
        return await self.result(model, await self.send(model, operation))

    async def results(self, model: str) -> list[Result]:
        """Wait for the results of all operations of a model, in order."""
        return [await self.result(model, key) for key in list(self.model(model).operations)]

    def model(self, model: str) -> ClientModel:
        return self.stage.engine.clients.models[model]

    def queued(self, model: str, key: str) -> Queued:
        return self.model(model).operations[key]

    async def until_ended(self, model: str) -> None:
        await self.stage.follower.wait_for(lambda _: self.model(model).closed is not None, WAIT_S)

    async def until_checkpointed(self, model: str, number: int) -> None:
        await self.stage.follower.wait_for(lambda _: self.model(model).checkpointed >= number, WAIT_S)


@asynccontextmanager
async def serving(bus: Bus, folder: Path, configured: bool = True, **options: object) -> AsyncIterator[TrainingClient]:
    """Start a hive with a client that has a session. Its trainers are the test's, with these `options`."""
    async with staged(bus, folder, serves=False) as stage:
        stage.options = stage.options.model_copy(update=options)
        if configured:
            await stage.configure(stage.job())
        client = TrainingClient(stage)
        await client.open()
        yield client


async def stopped(trainer: asyncio.Task[None]) -> None:
    """End a trainer as a crash of its process would, but for what its thread does."""
    trainer.cancel()
    await asyncio.gather(trainer, return_exceptions=True)


def create(adapter: AdapterSpec | None = SMALL, **more: object) -> CreateModel:
    return CreateModel(base=BASE, adapter=adapter, **more)  # type: ignore[arg-type]


def steps(seed: int, count: int) -> list[Operation]:
    """Return so many steps, each of two gradients of their own data."""
    found: list[Operation] = []
    for number in range(count):
        for half in range(2):
            found.append(forward_backward(*random_data(seed + 10 * number + half, 4)))
        found.append(optim_step())
    return found


def sampler(name: str) -> SaveWeights:
    return SaveWeights(checkpoint=CheckpointKind.SAMPLER, name=name)


def training(name: str) -> SaveWeights:
    return SaveWeights(checkpoint=CheckpointKind.TRAINING, name=name)


def merged(*lists: Sequence[Operation]) -> list[tuple[int, Operation]]:
    """Return the operations of several lists in turn, each with the number of its list."""
    longest = max(len(each) for each in lists)
    return [(number, each[place]) for place in range(longest) for number, each in enumerate(lists) if place < len(each)]
