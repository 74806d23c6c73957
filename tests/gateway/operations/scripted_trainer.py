"""A trainer of a run of operations that answers each of them with what a test has given, through a real bus."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from bombus.bus import Blobs, Bus
from bombus.bus.follow import Follower
from bombus.bus.large.parts import Parts
from bombus.commands.audit import audited
from bombus.hive import inbox
from bombus.hive.events import AdapterShape, ModelShape, SavedWeights, Weights
from bombus.hive.operations.state import ClientModel, Queued
from bombus.hive.records import digest
from bombus.hive.state import EngineState
from bombus.operations import (
    AbortEpoch,
    AdapterSpec,
    Array,
    CheckpointLoaded,
    CheckpointSaved,
    CreateModel,
    DType,
    EndModel,
    EpochAborted,
    Failed,
    ForwardBackward,
    LoadWeights,
    ModelEnded,
    ModelReady,
    Operation,
    OptimStep,
    Rejected,
    Result,
    SaveWeights,
    Scores,
    StepTaken,
    decode_operation,
    encode_result,
)
from bombus.replay.source import BusSource
from bombus_coordinator.shell import Coordinator
from bombus_gateway.context import Gateway
from tests.gateway.openai_hive import ENGINE, FILES, ScriptedReplica, gateway_of, new_id
from tests.patience import PATIENCE_S

Answering = Callable[[Operation], Result]


def plain_results(operation: Operation) -> Result:
    """Answer each operation as if it had succeeded: each token has the logprob -1."""
    match operation:
        case CreateModel(adapter=adapter):
            return ModelReady(adapter=adapter, parameters=10)
        case ForwardBackward(data=data):
            rows = [Array.of(DType.FLOAT32, [-1.0] * (len(datum.tokens) // 4)) for datum in data]
            count = sum(map(len, rows))
            outputs = tuple({"logprobs": row, "elementwise_loss": row} for row in rows)
            return Scores(outputs=outputs, loss=float(count), tokens=count)
        case OptimStep():
            return StepTaken(step=1, divisor=1.0, grad_norm=0.5)
        case AbortEpoch():
            return EpochAborted(step=1, operations=1)
        case SaveWeights(checkpoint=kind, name=name):
            return CheckpointSaved(
                checkpoint=kind, name=name, folder=f"/w/{name}", address=address_of(name), size_bytes=3
            )
        case LoadWeights(checkpoint=checkpoint):
            return CheckpointLoaded(checkpoint=checkpoint, step=1)
        case EndModel():
            return ModelEnded()
        case Rejected(failure=failure):
            return failure
    raise AssertionError(operation)


def address_of(checkpoint: str) -> str:
    """Return the address of what a checkpoint of this name has."""
    return digest(checkpoint.encode()).hex()


class OperationHive:
    """A hive with a gateway, a coordinator, and a trainer that a test can hold back with `may_work`, or from the models
    that are `held` alone.

    It has a `replica` once a test lets it join.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.follower = Follower(bus)
        self.executed: list[tuple[str, Operation]] = []
        self.answering: Answering = plain_results
        self.may_work = asyncio.Event()
        self.may_work.set()
        self.may_rest = asyncio.Event()  # or wake up: what it has done already is said then
        self.may_rest.set()
        self.held: set[str] = set()
        self.url = ""
        self.gateway: Gateway | None = None
        self.replica = ScriptedReplica()

    @property
    def engine(self) -> EngineState:
        return self.follower.hive.engine(ENGINE)

    async def join_replica(self) -> None:
        """Publish the base, and let the replica serve it."""
        await Blobs(self.bus).put("tokenizer-1", msgspec.msgpack.encode(FILES))
        saved = inbox.WeightsSaved(
            id=new_id(),
            engine=ENGINE,
            run=self.engine.run,
            step=0,
            trainer_epoch=self.engine.trainer_epoch,
            weights=Weights(where="nowhere", tokenizer="tokenizer-1"),
        )
        await self.bus.inbox.send(saved)
        await self.replica.start()
        await self.follower.wait_for(lambda _: self.engine.weights is not None, PATIENCE_S)
        await self.say_replica_alive()

    async def say_replica_alive(self) -> None:
        """Say once that the replica is there, and has loaded the base. Silence of some seconds ends it."""
        run, url = self.engine.run, self.replica.url
        alive = inbox.ReplicaAlive(id=new_id(), engine=ENGINE, replica="r1", url=url, run=run, version=0, capacity=8)
        await self.bus.inbox.send(alive)
        await self.follower.wait_for(lambda _: "r1" in self.engine.loaded, PATIENCE_S)

    async def say_away(self, model: str, why: str) -> None:
        """Say as the trainer that it cannot make a model again, or with "" that it can."""
        run, epoch = self.engine.run, self.engine.trainer_epoch
        away = inbox.ModelAway(id=new_id(), engine=ENGINE, run=run, trainer_epoch=epoch, model=model, why=why)
        await self.bus.inbox.send(away)
        await self.follower.wait_for(lambda _: self.engine.clients.models[model].suspended == why, PATIENCE_S)

    async def train(self) -> None:
        """Serve each run of operations, in the order of the log."""
        while True:
            await self.follower.wait_for(lambda _: self.engine.serves_operations)
            run = self.engine.run
            opens = inbox.TrainerOpens(id=new_id(), engine=ENGINE, run=run, trainer="t1")
            opened = await self.bus.inbox.request(opens)
            assert isinstance(opened, inbox.Done)
            serves = inbox.TrainerServes(id=new_id(), engine=ENGINE, run=run, trainer_epoch=opened.epoch)
            await self.bus.inbox.send(serves)
            while self.engine.serves_operations:
                await self.follower.wait_for(lambda _: bool(self._waiting()) or not self.engine.serves_operations)
                await self.may_work.wait()
                for model, queued in self._waiting()[:1]:
                    await self._execute(model, queued, opened.epoch)

    async def rest(self) -> None:
        """Sleep and wake up at once when that is asked for."""
        while True:
            await self.follower.wait_for(lambda _: self.engine.rest_wanted and not self.engine.asleep)
            await self._say_rest(asleep=True)
            await self.follower.wait_for(lambda _: self.engine.asleep and not self.engine.rest_wanted)
            await self._say_rest(asleep=False)

    async def _say_rest(self, asleep: bool) -> None:
        await self.may_rest.wait()
        run, epoch = self.engine.run, self.engine.trainer_epoch
        rests = inbox.TrainerRests(id=new_id(), engine=ENGINE, run=run, trainer_epoch=epoch, asleep=asleep)
        await self.bus.inbox.send(rests)
        await self.follower.wait_for(lambda _: self.engine.asleep == asleep)

    def _waiting(self) -> list[tuple[ClientModel, Queued]]:
        if self.engine.rest_wanted:
            return []
        found = [
            (model, queued)
            for model in self.engine.clients.open_models
            if model.name not in self.held
            for queued in model.operations.values()
            if queued.waits
        ]
        return sorted(found, key=lambda each: each[1].arrival)

    async def _execute(self, model: ClientModel, queued: Queued, epoch: int) -> None:
        parts = Parts(self.bus)
        operation: Operation = EndModel()
        if queued.body is not None:
            operation = decode_operation(await parts.fetch(queued.body))
        self.executed.append((model.name, operation))
        result = self.answering(operation)
        ref = await parts.store(self.bus.subjects.operation(ENGINE, model.name), encode_result(result))
        saved = None
        if isinstance(result, CheckpointSaved):
            saved = SavedWeights(
                use=result.checkpoint, name=result.name, folder=result.folder, address=result.address, size_bytes=3
            )
        done = inbox.OperationDone(
            id=new_id(),
            engine=ENGINE,
            run=model.run,
            trainer_epoch=epoch,
            model=model.name,
            number=queued.number,
            key=queued.key,
            result=ref,
            failed=isinstance(result, Failed),
            closes=isinstance(result, ModelEnded),
            made=_shape(result) if isinstance(result, ModelReady) else None,
            saved=saved,
        )
        await self.bus.inbox.send(done)
        await self.follower.wait_for(lambda _: not queued.waits or self.engine.run != model.run, PATIENCE_S)


def _shape(ready: ModelReady) -> ModelShape:
    spec: AdapterSpec | None = ready.adapter
    shape = None if spec is None else AdapterShape(rank=spec.rank, alpha=spec.alpha, parts=spec.parts)
    return ModelShape(adapter=shape, parameters=ready.parameters)


@asynccontextmanager
async def operation_hive(bus: Bus, **settings: Any) -> AsyncIterator[OperationHive]:
    """Run a hive while the block runs, and audit its log after it."""
    hive = OperationHive(bus)
    coordinator = Coordinator(bus)
    running = [asyncio.create_task(coordinator.lead()), asyncio.create_task(hive.follower.run())]
    try:
        await asyncio.wait_for(coordinator.leading.wait(), PATIENCE_S)
        running += [asyncio.create_task(hive.train()), asyncio.create_task(hive.rest())]
        async with gateway_of(bus, **settings) as (gateway, url):
            hive.gateway, hive.url = gateway, url
            yield hive
        report = await audited(BusSource(bus, "the log of this test"))
        assert not report.differences
    finally:
        await hive.replica.stop()
        for task in running:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*running, return_exceptions=True)
