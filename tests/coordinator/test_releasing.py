"""What of `ops` the leader purges: on a real stream, with a clock of the test's own."""

import asyncio
import secrets

import pytest

from bombus.bus import Bus
from bombus.bus.large.parts import Parts
from bombus.errors import Code, LogCorrupted, Refused
from bombus.hive import inbox
from bombus.hive.events import BatchDelivered, BatchHandedOut, Collection, GroupsPushed, OperationLimits
from bombus.hive.fold.evolve import evolve
from bombus.hive.inbox import Accepted, BatchTaken, Done, Pushed
from bombus.hive.records import BodyRef
from bombus.hive.state import EngineState, Hive
from bombus.hive.trajectories.queue import QueuedGroup
from bombus_coordinator.moving import BodyMover
from bombus_coordinator.releasing import GRACE_S, TRAJECTORIES, Releaser
from bombus_coordinator.shell import Coordinator
from tests.coordinator.core_in_memory import ENGINE
from tests.coordinator.operations_in_memory import BASE, MODEL, SESSION
from tests.coordinator.test_shell import leading
from tests.patience import PATIENCE_S


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TrainingClient:
    """A client and a trainer of one model, on a bus."""

    def __init__(self, bus: Bus, coordinator: Coordinator, model: str = MODEL) -> None:
        self.bus = bus
        self.core = coordinator.core
        self.model = model
        self.parts = Parts(bus)
        self.subject = bus.subjects.operation(ENGINE, model)
        self.ids = 0

    def id(self) -> str:
        self.ids += 1
        return f"{self.model}-{self.ids}"

    async def open(self) -> None:
        opened = inbox.OpenSession(id=self.id(), engine=ENGINE, session=SESSION)
        assert isinstance(await self.bus.inbox.request(opened), Done)
        await self.operate("0", "create_model")
        opens = inbox.TrainerOpens(id=self.id(), engine=ENGINE, run=1, trainer="t")
        assert isinstance(await self.bus.inbox.request(opens), Done)
        await self.done("0")

    def message(self, key: str, body: BodyRef, op: str = "forward_backward") -> inbox.Operate:
        return inbox.Operate(
            id=self.id(), engine=ENGINE, session=SESSION, model=self.model, key=key, op=op, body=body, base=BASE
        )

    async def operate(self, key: str, op: str = "forward_backward") -> Accepted:
        body = await self.parts.store(self.subject, f"operation {key}".encode())
        answer = await self.bus.inbox.request(self.message(key, body, op))
        assert isinstance(answer, Accepted)
        return answer

    async def done(self, key: str) -> None:
        queued = self.core.hive.engine(ENGINE).clients.models[self.model].operations[key]
        result = await self.parts.store(self.subject, f"result {key}".encode())
        await self.bus.inbox.send(
            inbox.OperationDone(
                id=self.id(),
                engine=ENGINE,
                run=1,
                trainer_epoch=1,
                model=self.model,
                number=queued.number,
                key=key,
                result=result,
            )
        )
        await self.until(lambda: not queued.waits)

    async def checkpoint(self, number: int) -> None:
        written = inbox.CheckpointWritten(
            id=self.id(),
            engine=ENGINE,
            run=1,
            trainer_epoch=1,
            model=self.model,
            number=number,
            folder="/c",
            digest="d",
        )
        await self.bus.inbox.send(written)
        await self.until(lambda: self.core.hive.engine(ENGINE).clients.models[self.model].checkpointed == number)

    async def until(self, holds: object) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # type: ignore[operator]
                await asyncio.sleep(0.01)


async def configure(bus: Bus, **limits: object) -> None:
    rules = Collection(operations=OperationLimits(**limits))  # type: ignore[arg-type]
    configured = inbox.Configure(
        id="configure", engine=ENGINE, config="{}", config_digest="d", collection=rules, model="tiny"
    )
    assert isinstance(await bus.inbox.request(configured), Done)


async def report_until(releaser: Releaser, client: TrainingClient, released: int) -> None:
    await releaser.report()
    await client.until(lambda: client.core.hive.released == released)


async def test_r17_what_no_trainer_and_no_client_needs_is_released_on_the_log_and_then_purged(bus: Bus) -> None:
    clock = Clock()
    async with leading(bus) as coordinator:
        await configure(bus, results_bytes_max=20)
        client = TrainingClient(bus, coordinator)
        await client.open()  # 1, and its result at 2
        for key in ("1", "2"):
            await client.operate(key)  # 3, 5
            await client.done(key)  # 4, 6
        releaser = Releaser(bus, lambda: coordinator.core.hive, clock=clock)
        await client.checkpoint(2)
        await releaser.report()
        clock.now_s = GRACE_S - 1
        await releaser.report()
        assert coordinator.core.hive.released == 0, "nothing that is younger than the grace"
        clock.now_s = GRACE_S
        await report_until(releaser, client, 4)
        await releaser.purge(releaser.released())
        state = await bus.state(bus.subjects.ops_stream)
        assert (state.first_seq, state.last_seq) == (4, 6), "operation 2 is at 5, the results that are kept at 4 and 6"
        for queued in coordinator.core.hive.engine(ENGINE).clients.models[MODEL].again():
            assert queued.body is not None
            assert await client.parts.fetch(queued.body) == f"operation {queued.key}".encode()


async def test_a_body_that_waited_too_long_for_its_operation_is_refused_and_stored_again(bus: Bus) -> None:
    clock = Clock()
    async with leading(bus) as coordinator:
        client = TrainingClient(bus, coordinator)
        early = await client.parts.store(client.subject, b"early")
        releaser = Releaser(bus, lambda: coordinator.core.hive, clock=clock)
        await releaser.report()
        clock.now_s = GRACE_S
        await report_until(releaser, client, 2)
        await releaser.purge(releaser.released())
        with pytest.raises(LogCorrupted):
            await client.parts.fetch(early)
        await client.open()
        with pytest.raises(Refused) as refused:
            await bus.inbox.request(client.message("1", early))
        assert refused.value.code == Code.BODY_GONE
        await client.operate("1")


async def test_an_overfull_stream_is_purged_subject_by_subject(bus: Bus) -> None:
    clock = Clock()
    async with leading(bus) as coordinator:
        await configure(bus, results_bytes_max=1)
        idle, busy = TrainingClient(bus, coordinator), TrainingClient(bus, coordinator, "s:train:1")
        await idle.open()
        await busy.operate("0", "create_model")
        await busy.done("0")
        for _ in range(2):  # over half of the stream, of which nothing is an operation
            await busy.parts.store(busy.subject, bytes(17 << 20))
        await busy.operate("1")
        await busy.done("1")
        await busy.checkpoint(2)
        releaser = Releaser(bus, lambda: coordinator.core.hive, clock=clock)
        await releaser.report()
        clock.now_s = GRACE_S
        await releaser.report()
        models = coordinator.core.hive.engine(ENGINE).clients
        await busy.until(lambda: models.released)
        before = await bus.state(bus.subjects.ops_stream)
        await releaser.purge(releaser.released())
        after = await bus.state(bus.subjects.ops_stream)
        assert after.first_seq == before.first_seq == 1, "the idle model may have to be made again"
        assert after.messages < 10 < before.messages


async def test_rollout_groups_that_were_taken_are_released_sooner_where_their_stream_is_overfull(bus: Bus) -> None:
    clock, hive = Clock(), Hive()
    parts = Parts(bus, bus.subjects.trajectories_stream)
    releaser = Releaser(bus, lambda: hive, clock=clock, bodies=TRAJECTORIES)
    for reported in (0, 1):
        await parts.store(bus.subjects.trajectory(ENGINE, ""), bytes(17 << 20))  # twice is over half of 64 MB
        await releaser.report()
        assert (await bus.state(bus.subjects.inbox_stream)).last_seq == reported
        clock.now_s += 60


async def test_a_group_that_fits_nowhere_is_stored_once_more_so_that_what_came_after_it_goes(bus: Bus) -> None:
    clock, stream, parts = Clock(), bus.subjects.trajectories_stream, Parts(bus, bus.subjects.trajectories_stream)

    async def push(size: int, sequences: int) -> None:
        body = await parts.store(bus.subjects.trajectory(ENGINE, ""), bytes(size))
        group = QueuedGroup(environment=None, sequences=sequences, body=body)
        pushed = await bus.inbox.request(inbox.PushGroups(id=secrets.token_hex(8), engine=ENGINE, groups=(group,)))
        assert isinstance(pushed, Pushed)

    async with leading(bus) as coordinator:
        registers = inbox.RegisterTrainer(
            id="r", engine=ENGINE, trainer="7", batch_size=4, max_token_len=9, checkpoint_dir="c", num_steps=9,
            save_checkpoint_interval=1, starting_step=0,
        )  # fmt: skip
        assert isinstance(await bus.inbox.request(registers), Done)
        await push(1_000, 3)  # fits no batch with groups of 4
        for size in (17 << 20, 17 << 20, 1_000):
            await push(size, 4)
        releaser = Releaser(bus, lambda: coordinator.core.hive, clock=clock, bodies=TRAJECTORIES)
        for number in (1, 2, 3):
            taken = await bus.inbox.request(inbox.TakeBatch(id=f"t{number}", engine=ENGINE))
            assert isinstance(taken, BatchTaken)
            assert taken.number == number
            sent = inbox.BatchSent(id=f"s{number}", engine=ENGINE, run=1, number=number)
            await bus.inbox.send(sent)
        await releaser.report()
        clock.now_s += 60
        await releaser.report()
        state = coordinator.core.hive.engine(ENGINE).trajectories
        async with asyncio.timeout(PATIENCE_S):
            while (stranded := state.queue.groups[1].body) is not None and stranded.first == 1:
                await asyncio.sleep(0.01)
        await releaser.report()
        async with asyncio.timeout(PATIENCE_S):
            while not coordinator.core.hive.trajectories_released:
                await asyncio.sleep(0.01)
        await releaser.purge(releaser.released())
        left = await bus.state(stream)
        assert left.bytes < 1 << 20
        assert stranded is not None
        assert await parts.fetch(stranded) == bytes(1_000)


async def test_the_last_batch_is_stored_once_more_while_its_trainer_trains(bus: Bus) -> None:
    clock, stream, parts = Clock(), bus.subjects.trajectories_stream, Parts(bus, bus.subjects.trajectories_stream)
    subject = bus.subjects.trajectory(ENGINE, "")
    async with leading(bus) as coordinator:
        registers = inbox.RegisterTrainer(
            id="r", engine=ENGINE, trainer="7", batch_size=4, max_token_len=9, checkpoint_dir="c", num_steps=9,
            save_checkpoint_interval=1, starting_step=0,
        )  # fmt: skip
        assert isinstance(await bus.inbox.request(registers), Done)
        group = QueuedGroup(environment=None, sequences=4, body=await parts.store(subject, bytes(1_000)))
        await bus.inbox.request(inbox.PushGroups(id="p", engine=ENGINE, groups=(group,)))
        await bus.inbox.request(inbox.TakeBatch(id="t", engine=ENGINE, after=0))
        await bus.inbox.send(inbox.BatchSent(id="s", engine=ENGINE, run=1, number=1))
        for _ in range(2):
            await parts.store(subject, bytes(17 << 20))  # of pushes that were refused
        releaser = Releaser(bus, lambda: coordinator.core.hive, clock=clock, bodies=TRAJECTORIES)
        await releaser.report()
        clock.now_s += 60
        async with asyncio.timeout(PATIENCE_S):
            while coordinator.core.hive.trajectories_released < 30:
                await releaser.report()
                await asyncio.sleep(0.01)
        await releaser.purge(releaser.released())
        assert (await bus.state(stream)).bytes < 1 << 20
        await bus.inbox.request(inbox.TakeBatch(id="again", engine=ENGINE, after=0))
        state = coordinator.core.hive.engine(ENGINE).trajectories
        assert state.batch is not None
        (kept,) = state.batch.groups
        assert kept.body is not None
        assert await parts.fetch(kept.body) == bytes(1_000)


async def test_nothing_is_stored_once_more_where_nothing_could_be_purged_for_it(bus: Bus) -> None:
    """A batch that was handed out, and has not arrived, keeps what was stored after it."""
    parts, subject, hive = Parts(bus, bus.subjects.trajectories_stream), bus.subjects.trajectory(ENGINE, ""), Hive()
    for _ in range(2):
        body = await parts.store(subject, bytes(1_000))
        evolve(hive, GroupsPushed(engine=ENGINE, groups=(QueuedGroup(environment=None, sequences=1, body=body),)))
        await parts.store(subject, bytes(8 << 20))
    evolve(hive, BatchHandedOut(engine=ENGINE, run=0, number=1, groups=(1,)))
    stream = bus.subjects.trajectories_stream
    state = await bus.state(stream)
    await BodyMover(bus, lambda: hive).move(state.last_seq + 1, state)
    assert (await bus.state(stream)).last_seq == state.last_seq
    evolve(hive, BatchDelivered(engine=ENGINE, run=0, number=1))
    await BodyMover(bus, lambda: hive).move(state.last_seq + 1, state)
    assert (await bus.state(stream)).last_seq == state.last_seq + 2


async def test_groups_that_make_up_much_of_a_stream_are_left_where_they_are(bus: Bus) -> None:
    parts = Parts(bus, bus.subjects.trajectories_stream)
    hive = Hive()
    bodies = [await parts.store(bus.subjects.trajectory(ENGINE, ""), bytes(1_000)) for _ in range(8)]
    pushed = tuple(QueuedGroup(environment=None, sequences=1, body=body) for body in bodies)
    evolve(hive, GroupsPushed(engine=ENGINE, groups=pushed))
    state = await bus.state(bus.subjects.trajectories_stream)
    await BodyMover(bus, lambda: hive).move(state.last_seq + 1, state)
    assert (await bus.state(bus.subjects.trajectories_stream)).last_seq == 8
    assert (await bus.state(bus.subjects.inbox_stream)).last_seq == 0


async def test_a_waiting_group_that_is_lost_is_given_up_when_its_body_is_to_be_stored_once_more(bus: Bus) -> None:
    parts = Parts(bus, bus.subjects.trajectories_stream)
    async with leading(bus) as coordinator:
        for number in range(2):
            body = await parts.store(bus.subjects.trajectory(ENGINE, ""), bytes(1_000))
            group = QueuedGroup(environment=None, sequences=1, body=body)
            await bus.inbox.request(inbox.PushGroups(id=f"p{number}", engine=ENGINE, groups=(group,)))
            await parts.store(bus.subjects.trajectory(ENGINE, ""), bytes(1 << 20))
        await bus.purge_below(bus.subjects.trajectories_stream, 2)
        state = await bus.state(bus.subjects.trajectories_stream)
        await BodyMover(bus, lambda: coordinator.core.hive).move(state.last_seq, state)
        kept = coordinator.core.hive.engine(ENGINE).trajectories
        async with asyncio.timeout(PATIENCE_S):
            while not kept.given_up:
                await asyncio.sleep(0.01)
        assert list(kept.queue.groups) == [2]


async def test_r6_what_is_released_goes_back_to_the_end_of_a_stream_that_has_lost_it(bus: Bus) -> None:
    async with leading(bus) as coordinator:
        client = TrainingClient(bus, coordinator)
        coordinator.core.hive.released = 9
        releaser = Releaser(bus, lambda: coordinator.core.hive)
        await report_until(releaser, client, 1)
        engine = coordinator.core.hive.engines.setdefault(ENGINE, EngineState(name=ENGINE))
        of_ann = engine.trajectories.queue.kept_of("ann")
        of_ann.released = engine.clients.released["m"] = 9
        for each in (releaser, Releaser(bus, lambda: coordinator.core.hive, bodies=TRAJECTORIES)):
            await each.report()
        async with asyncio.timeout(PATIENCE_S):
            while (of_ann.released, engine.clients.released["m"]) != (1, 1):
                await asyncio.sleep(0.01)


async def test_a_hive_without_operations_is_told_nothing(bus: Bus) -> None:
    hive, clock = Hive(), Clock()
    releaser = Releaser(bus, lambda: hive, clock=clock)
    for _ in range(3):
        clock.now_s += GRACE_S
        await releaser.report()
    assert (await bus.state(bus.subjects.inbox_stream)).last_seq == 0
    await releaser.purge(releaser.released())
