"""Training operations on a real log: leaders die, clients repeat, trainers execute again (R17)."""

import asyncio

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.bus.large.parts import Parts
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.inbox import Accepted, Done
from bombus.hive.operations.state import Queued
from bombus.hive.state import EngineState, Phase
from bombus.operations import (
    AdamParams,
    OptimStep,
    Reduction,
    StepTaken,
    decode_operation,
    decode_result,
    encode_operation,
    encode_result,
)
from tests.coordinator.core_in_memory import ENGINE
from tests.coordinator.operations_in_memory import BASE
from tests.coordinator.test_shell import leading, log_of
from tests.patience import PATIENCE_S

OPERATIONS = 8
SESSIONS = ("ann", "bob")


def step(rate: float) -> bytes:
    return encode_operation(OptimStep(adam=AdamParams(learning_rate=rate), reduction=Reduction.SUM))


async def client(bus: Bus, session: str) -> list[Accepted]:
    """Send a model's operations, each of them twice."""
    opened = inbox.OpenSession(id=f"{session}-open", engine=ENGINE, session=session)
    assert isinstance(await bus.inbox.request(opened, timeout_s=60), Done)
    model = f"{session}:train:0"
    answers = []
    for number in range(OPERATIONS):
        for attempt in range(2):
            body = await Parts(bus).store(bus.subjects.operation(ENGINE, model), step(float(number)))
            message = inbox.Operate(
                id=f"{model}-{number}-{attempt}",
                engine=ENGINE,
                session=session,
                model=model,
                key=str(number),
                op="optim_step" if number else "create_model",
                body=body,
                base=BASE,
            )
            answer = await bus.inbox.request(message, timeout_s=60)
            assert isinstance(answer, Accepted)
            answers.append(answer)
    return answers


async def trainer(bus: Bus) -> None:
    """Execute whatever waits; a result of an operation is the number of its step."""
    parts = Parts(bus)
    follower = Follower(bus)
    following = asyncio.create_task(follower.run())
    try:
        await follower.wait_for(lambda hive: hive.engine(ENGINE).phase == Phase.BOOTING)
        opens = inbox.TrainerOpens(id="opens", engine=ENGINE, run=1, trainer="t")
        opened = await bus.inbox.request(opens, timeout_s=60)
        assert isinstance(opened, Done)
        await bus.inbox.send(inbox.TrainerServes(id="serves", engine=ENGINE, run=1, trainer_epoch=opened.epoch))
        sent: set[tuple[str, int]] = set()
        while len(sent) < OPERATIONS * len(SESSIONS):
            await follower.wait_for(lambda hive: bool(ahead(hive.engine(ENGINE), sent)))
            for model, queued in ahead(follower.hive.engine(ENGINE), sent):
                assert queued.body is not None
                operation = decode_operation(await parts.fetch(queued.body))
                assert isinstance(operation, OptimStep)
                taken = encode_result(StepTaken(step=int(operation.adam.learning_rate), divisor=1.0, grad_norm=0.0))
                done = inbox.OperationDone(
                    id=f"done-{model}-{queued.number}",
                    engine=ENGINE,
                    run=1,
                    trainer_epoch=opened.epoch,
                    model=model,
                    number=queued.number,
                    key=queued.key,
                    result=await parts.store(bus.subjects.operation(ENGINE, model), taken),
                )
                await bus.inbox.send_when_back(done)
                sent.add((model, queued.number))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def ahead(engine: EngineState, sent: set[tuple[str, int]]) -> list[tuple[str, Queued]]:
    return [
        (model.name, queued)
        for model in engine.clients.open_models
        for queued in model.again()
        if queued.waits and (model.name, queued.number) not in sent
    ]


async def test_r17_operations_survive_the_death_of_leaders_and_are_completed_once_in_their_order(bus: Bus) -> None:
    clients = asyncio.gather(*(client(bus, session) for session in SESSIONS))
    executing = asyncio.create_task(trainer(bus))
    async with asyncio.timeout(4 * PATIENCE_S):
        while not executing.done():
            async with leading(bus):
                await asyncio.wait({executing}, timeout=0.4)
        await executing
        async with leading(bus) as coordinator:
            answers = await clients
            state = coordinator.core.hive.engine(ENGINE).clients
            while state.waiting:
                await asyncio.sleep(0.01)
    for session, given in zip(SESSIONS, answers):
        expected = [f"{session}:train:0:{number}" for number in range(OPERATIONS) for _ in range(2)]
        assert [each.operation for each in given] == expected
    events = [ev.decode_event(stored.data) for stored in await log_of(bus)]
    for session in SESSIONS:
        model = f"{session}:train:0"
        done = [each for each in events if isinstance(each, ev.OperationCompleted) and each.model == model]
        assert [each.number for each in done] == list(range(1, OPERATIONS + 1))
        results = [decode_result(await Parts(bus).fetch(each.result)) for each in done]
        assert results == [StepTaken(step=number, divisor=1.0, grad_norm=0.0) for number in range(OPERATIONS)]
    assert sum(isinstance(each, ev.EpochOpened) for each in events) > 1, "a leader died"
