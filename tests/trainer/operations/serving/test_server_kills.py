"""R17 on real trainer processes, killed at every fault point of a run of operations: nothing that they make changes."""

import asyncio
import os
import signal
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bombus.bus import Bus
from bombus.bus.streams import stream_configs
from bombus.commands import resume
from bombus.faults import Point
from bombus.hive import inbox
from bombus.hive.events import ModelCheckpointed, OperationBegun, OperationCompleted
from bombus.operations import (
    Category,
    CheckpointSaved,
    Failed,
    LoadWeights,
    Operation,
    Result,
    Scores,
    StepTaken,
    encode_result,
)
from tests.conftest import SMALL_STREAMS
from tests.effort import LONG, long_only
from tests.trainer.forked_trainers import Forge
from tests.trainer.operations.serving.serving_hive import (
    LARGE,
    SMALL,
    TrainingClient,
    create,
    merged,
    sampler,
    serving,
    steps,
    training,
)
from tests.trainer.operations.small_models import datum, forward_backward, random_data
from tests.trainer.trainer_hive import ENGINE
from tests.trainer.trainer_lives import Life

FIRST = (Point.SERVING_SAID, Point.OPERATION_SEEN)  # in a run that boots, and with nothing to make again
ITS = ("operation.", "model_checkpoint.", "serving.", "trainer.checkpoint.")
KILLED = [point for point in Point if point.startswith(ITS) and point is not Point.SERVING_SAID]
FROZEN = (
    Point.OPERATION_READ,
    Point.OPERATION_EXECUTED,
    Point.OPERATION_SAID,
    Point.MODEL_CHECKPOINT_WRITTEN,
    Point.MODEL_CHECKPOINT_SEEN,
)
OPERATION = [point for point in KILLED if point.startswith("operation.")]
# With a recovery checkpoint every few gradients most lives begin with one and operations after it; without any, with
# all operations.
LIVES = {1000: (*FIRST, *KILLED, *(reversed(KILLED[1:]) if LONG else ())), 1 << 30: (*FIRST, *OPERATION)}


def script(seed: int) -> list[Operation]:
    """Return operations of a model with something of everything: a failed gradient, a save, a load."""
    return [
        *steps(seed, 3),
        forward_backward(datum([99])),
        *steps(seed + 1000, 1),
        forward_backward(*random_data(seed, 2), forward_only=True),
        training("half"),
        *steps(seed + 2000, 3),
        LoadWeights(checkpoint=f"{'a' if seed == 100 else 'b'}/training/half", with_optimizer=True),
        *steps(seed + 3000, 4),
        sampler("end"),
    ]


def operations() -> list[tuple[int, Operation]]:
    return merged([create(SMALL), *script(100)], [create(LARGE), *script(200)])


def comparable(result: Result) -> bytes:
    """Return a result without the folder that it was written to."""
    if isinstance(result, CheckpointSaved):
        return f"{result.checkpoint}/{result.name}/{result.address}".encode()
    return encode_result(result)


@asynccontextmanager
async def another_hive(url: str, name: str) -> AsyncIterator[Bus]:
    async with await Bus.connect(url, name, name="test") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        yield bus
        for config in stream_configs(bus.subjects, SMALL_STREAMS):
            await bus.requests.request(f"$JS.API.STREAM.DELETE.{config['name']}")


async def found(client: TrainingClient) -> dict[str, list[bytes]]:
    return {model: [comparable(each) for each in await client.results(model)] for model in "ab"}


@pytest.mark.parametrize("checkpoint_bytes", [1000, pytest.param(1 << 30, marks=long_only)])
async def test_r17_killed_at_each_point_a_trainer_publishes_each_result_once_and_with_the_same_bytes(
    nats_url: str, bus: Bus, hive: str, tmp_path: Path, forge: Forge, checkpoint_bytes: int
) -> None:
    async with serving(bus, tmp_path / "killed", checkpoint_s=600.0, checkpoint_bytes=checkpoint_bytes) as client:
        for number, operation in operations():
            await client.send("ab"[number], operation)
        life = Life(client.stage, forge, nats_url)
        for point in LIVES[checkpoint_bytes]:
            await life.dies(point)
        await life.trainer()
        killed = await found(client)
        completed = [each for each in client.stage.events if isinstance(each, OperationCompleted)]
        checkpoints = [each for each in client.stage.events if isinstance(each, ModelCheckpointed)]
        assert len(completed) == len(operations())
        assert len({each.trainer_epoch for each in completed}) > 3, "several lives have executed something"
        assert (len(checkpoints) > 5) == (checkpoint_bytes == 1000)
        assert client.stage.engine.suspensions == 0
        forge.kill_all()
    async with another_hive(nats_url, f"{hive}-calm") as second, serving(second, tmp_path / "calm") as calm:
        for number, operation in operations():
            await calm.send("ab"[number], operation)
        await Life(calm.stage, forge, nats_url).trainer()
        assert await found(calm) == killed


async def test_r17_a_trainer_that_was_frozen_while_another_took_over_changes_nothing(
    nats_url: str, bus: Bus, tmp_path: Path, forge: Forge
) -> None:
    frozen = FROZEN if LONG else FROZEN[::2]
    async with serving(bus, tmp_path, checkpoint_s=0.0) as client:
        life = Life(client.stage, forge, nats_url)
        await client.send("m", create(SMALL))
        for seed, point in enumerate(frozen):
            for operation in (*steps(seed, 2), training(f"step-{seed}")):
                await client.send("m", operation)
            zombie = await life.freezes(point)
            successor = await life.trainer()
            before = [comparable(each) for each in await client.results("m")]
            await client.until_checkpointed("m", len(before))
            os.kill(zombie, signal.SIGCONT)
            assert (await life.ended(zombie)).by(signal.SIGKILL, Point.TRAINER_SUPERSEDED), point
            await forge.kill(successor)
            assert [comparable(each) for each in await client.results("m")] == before
        await life.trainer()
        last = await client.do("m", sampler("end"))
        calm = [create(SMALL), *(each for seed in range(len(frozen)) for each in steps(seed, 2)), sampler("end")]
        for operation in calm:
            await client.send("calm", operation)
        assert comparable((await client.results("calm"))[-1]) == comparable(last)


async def test_r17_an_operation_that_ends_its_trainer_each_time_fails_in_words_and_the_others_go_on(
    nats_url: str, bus: Bus, tmp_path: Path, forge: Forge
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=600.0) as client:
        life = Life(client.stage, forge, nats_url)
        first = await life.trainer()
        for model, seed in (("a", 1), ("b", 2)):
            await client.do(model, create(SMALL))
            await client.do(model, forward_backward(*random_data(seed, 2)))
        await forge.kill(first)
        deadly = await client.send("a", forward_backward(*random_data(3, 2)))
        for _ in range(3):
            await life.dies(Point.OPERATION_EXECUTED)
        stepped = [await client.send(model, steps(4, 1)[-1]) for model in "ab"]
        await life.trainer()
        failed = await client.result("a", deadly)
        assert isinstance(failed, Failed)
        assert failed.category is Category.SERVER
        assert "trainers ended 3 times while they executed this operation" in failed.error
        spoiled, taken = await client.result("a", stepped[0]), await client.result("b", stepped[1])
        assert isinstance(spoiled, Failed)
        assert "trainers ended 3 times" in spoiled.error, "its gradient lacks something"
        assert isinstance(taken, StepTaken)
        begun = [each for each in client.stage.events if isinstance(each, OperationBegun)]
        assert len([each for each in begun if (each.model, each.key) == ("a", deadly)]) == 3
        assert client.stage.engine.suspensions == 0
        after = await client.do("a", steps(5, 1)[-1])
        assert isinstance(after, StepTaken), "and the model goes on"


async def test_r17_an_operation_that_ends_its_trainer_whenever_it_is_executed_again_holds_up_its_model_alone(
    nats_url: str, bus: Bus, tmp_path: Path, forge: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=600.0) as client:
        stage = client.stage
        life = Life(stage, forge, nats_url)
        first = await life.trainer()
        for model, seed in (("a", 1), ("b", 2)):
            for operation in (create(SMALL), forward_backward(*random_data(seed, 2))):
                await client.do(model, operation)
        await forge.kill(first)
        waits = {model: await client.send(model, steps(4, 1)[-1]) for model in "ab"}
        for time in (1, 2, 1, 2, 2, 1):  # the second operation of a is deadly, and some die of other things
            await life.dies(Point.OPERATION_MADE_AGAIN, time)
        last = await life.trainer()
        assert isinstance(await client.result("b", waits["b"]), StepTaken)
        assert client.queued("a", waits["a"]).waits
        assert "3 trainers ended while they rebuilt it, at operation 2, so" in client.model("a").suspended
        assert client.model("b").suspended == ""
        assert stage.engine.suspensions == 0
        asked = Namespace(nats=nats_url, hive=bus.subjects.hive, engine=ENGINE)
        assert await asyncio.to_thread(resume.run, asked) == 0
        assert "the trainer of engine main will try again to rebuild a" in capsys.readouterr().out
        assert isinstance(await client.result("a", waits["a"]), StepTaken), "after the operator has looked"
        assert client.model("a").suspended == ""
        await forge.kill(last)


async def test_a_model_that_no_trainer_makes_again_is_said_to_wait_before_the_next_one_may_end_the_trainer(
    nats_url: str, bus: Bus, tmp_path: Path, forge: Forge
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=600.0) as client:
        life = Life(client.stage, forge, nats_url)
        first = await life.trainer()
        for model, seed in (("a", 1), ("b", 2)):
            for operation in (create(SMALL), forward_backward(*random_data(seed, 2))):
                await client.do(model, operation)
        await forge.kill(first)
        await client.send("b", steps(4, 1)[-1])
        for time in (2, 2, 2, 2, 1):  # four at the second operation of a, and the last one at the first of b
            await life.dies(Point.OPERATION_MADE_AGAIN, time)
        await client.stage.follower.wait_for(lambda _: client.model("a").suspended != "", 10.0)
        assert client.model("a").rebuilding_by == 0
        assert client.model("b").rebuilding_by == client.stage.engine.trainer_epoch
        assert client.stage.engine.trainers_lost == 1, "the first one, that made nothing again"


async def test_a_checkpoint_that_is_removed_after_its_load_stays_until_a_recovery_checkpoint_has_what_was_loaded(
    nats_url: str, bus: Bus, tmp_path: Path, forge: Forge
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=600.0) as client:
        life = Life(client.stage, forge, nats_url)
        first = await life.trainer()
        await client.do("m", create(SMALL))
        kept = await client.do("m", training("x"))
        assert isinstance(kept, CheckpointSaved)
        for operation in steps(1, 1):
            await client.do("m", operation)
        await forge.kill(first)
        await client.send("m", LoadWeights(checkpoint="m/training/x", with_optimizer=True))
        await life.dies(Point.OPERATION_SEEN)
        removal = inbox.RemoveWeights(id=client.stage.id(), engine=ENGINE, model="m", use="training", name="x")
        await bus.inbox.request(removal)
        await life.dies(Point.MODEL_CHECKPOINT_BEGUN)
        assert Path(kept.folder).exists()
        await life.trainer()
        assert isinstance(await client.do("m", forward_backward(*random_data(2, 2))), Scores)
        assert not Path(kept.folder).exists()
        assert client.model("m").suspended == ""
