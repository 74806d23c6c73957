"""A trainer that sleeps has no model in memory, and one that wakes up goes on bit for bit."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from bombus.bus import Bus
from bombus.errors import Refused
from bombus.faults import Point
from bombus.hive import inbox
from bombus.hive.events import OperationCompleted
from bombus.operations import Operation
from bombus_trainer.operations.executor import OperationExecutor
from tests.effort import long_only
from tests.trainer.forked_trainers import Forge
from tests.trainer.operations.serving.serving_hive import (
    LARGE,
    SMALL,
    TrainingClient,
    create,
    sampler,
    serving,
    steps,
    stopped,
)
from tests.trainer.operations.serving.test_server_kills import comparable
from tests.trainer.operations.small_models import forward_backward, optim_step, random_data
from tests.trainer.trainer_hive import ENGINE, WAIT_S
from tests.trainer.trainer_lives import Life

FIRST: list[Operation] = [create(LARGE), *steps(1, 2), forward_backward(*random_data(9, 3))]  # with a gradient
THEN: list[Operation] = [forward_backward(*random_data(8, 2)), optim_step(), *steps(30, 1), sampler("end")]


@pytest.fixture
async def client(bus: Bus, tmp_path: Path) -> AsyncIterator[TrainingClient]:
    async with serving(bus, tmp_path, checkpoint_s=600.0) as client:
        yield client


async def rest(client: TrainingClient, asleep: bool) -> None:
    """Ask for it, and wait until it is so."""
    await client.stage.bus.inbox.request(inbox.AskRest(id=client.stage.id(), engine=ENGINE, asleep=asleep))
    await client.stage.follower.wait_for(lambda _: client.stage.engine.asleep == asleep, WAIT_S)


def in_memory() -> tuple[int, int]:
    """Return how many executors there are in this process, and how many numbers parameters have."""
    gc.collect()
    found = gc.get_objects()
    executors = sum(type(each) is OperationExecutor for each in found)
    return executors, sum(each.numel() for each in found if type(each) is torch.nn.Parameter)


async def until_no_more_than(before: tuple[int, int]) -> None:
    """Wait until no more is in memory than before: the frames that have published the sleep may still be unwinding."""
    async with asyncio.timeout(WAIT_S):
        while any(now > earlier for now, earlier in zip(in_memory(), before)):
            await asyncio.sleep(0.01)


async def found(client: TrainingClient, model: str) -> list[bytes]:
    return [comparable(each) for each in await client.results(model)]


async def test_a_trainer_that_sleeps_has_no_model_in_memory_and_goes_on_bit_for_bit(client: TrainingClient) -> None:
    before = in_memory()
    client.stage.train()
    for operation in (*FIRST, *THEN):
        await client.send("whole", operation)
    wanted = await found(client, "whole")
    await client.do("other", create(SMALL))
    for operation in FIRST:
        await client.send("cut", operation)
    await client.results("cut")
    await rest(client, asleep=True)
    await until_no_more_than(before)
    assert client.model("cut").checkpointed == len(FIRST), "nothing has to be executed again"
    for operation in THEN:
        await client.send("cut", operation)
    assert client.model("cut").waiting == len(THEN)
    await rest(client, asleep=False)
    assert await found(client, "cut") == wanted
    for operation in steps(50, 1):
        await client.do("other", operation)


async def test_sleep_is_over_as_often_as_it_begins_and_no_model_is_created_in_between(client: TrainingClient) -> None:
    client.stage.train()
    await client.do("m", create())
    for number in range(2):
        await rest(client, asleep=True)
        with pytest.raises(Refused, match="creates no models until it is woken by /wake_up"):
            await client.send(f"new-{number}", create(LARGE))
        await rest(client, asleep=False)
        await client.do(f"new-{number}", create(LARGE))
    assert len(client.stage.engine.clients.open_models) == 3


async def test_a_trainer_that_is_to_sleep_again_while_it_wakes_up_sleeps_on(client: TrainingClient) -> None:
    before = in_memory()
    client.stage.train()
    await client.do("m", create())
    await rest(client, asleep=True)
    for asleep in (False, True):
        asked = inbox.AskRest(id=client.stage.id(), engine=ENGINE, asleep=asleep)
        await client.stage.bus.inbox.request(asked)
    key = await client.send("m", optim_step())
    await client.stage.follower.wait_for(lambda _: client.stage.engine.asleep, WAIT_S)
    assert client.queued("m", key).waits
    await rest(client, asleep=False)
    await client.result("m", key)
    await rest(client, asleep=True)
    await until_no_more_than(before)


async def test_a_trainer_that_dies_while_it_sleeps_leaves_its_sleep_to_the_next(client: TrainingClient) -> None:
    before = in_memory()
    trainer = client.stage.train()
    await client.do("m", create())
    await rest(client, asleep=True)
    await stopped(trainer)
    client.stage.train()
    await client.stage.follower.wait_for(lambda _: client.stage.engine.trainer_epoch == 2, WAIT_S)
    await until_no_more_than(before)
    key = await client.send("m", optim_step())
    await rest(client, asleep=False)
    await client.result("m", key)


@long_only
async def test_r17_killed_as_it_falls_asleep_and_as_it_wakes_up_a_trainer_changes_nothing(
    nats_url: str, bus: Bus, tmp_path: Path, forge: Forge
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=600.0) as client:
        life = Life(client.stage, forge, nats_url)
        trainer = await life.trainer()
        for operation in (*FIRST, *THEN):
            await client.send("whole", operation)
        wanted = await found(client, "whole")
        for operation in FIRST:
            await client.send("cut", operation)
        await client.results("cut")
        await forge.kill(trainer)
        for asleep, point in ((True, Point.REST_FREED), (False, Point.REST_WOKEN)):
            asked = inbox.AskRest(id=client.stage.id(), engine=ENGINE, asleep=asleep)
            await client.stage.bus.inbox.request(asked)
            await life.dies(point)
            trainer = await life.trainer()
            await rest(client, asleep)
            if asleep:
                await forge.kill(trainer)
        for operation in THEN:
            await client.send("cut", operation)
        assert await found(client, "cut") == wanted
        completed = [each for each in client.stage.events if isinstance(each, OperationCompleted)]
        assert len(completed) == 2 * len(wanted)
