"""Real trainer processes that hang in a thread or as a whole. Each is replaced, and each step is made once."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from bombus.faults import Point
from bombus.hive.events import TrainerOpened, TrainerStalled
from bombus.hive.state import Phase
from bombus_trainer.recovery.watch import EXIT_HUNG
from tests.effort import long_only
from tests.trainer.forked_trainers import Forge
from tests.trainer.trainer_hive import WAIT_S
from tests.trainer.trainer_lives import Life, running, undisturbed

STALL_S = 6.0
# Where a thread hangs, and what it is then said to do.
THREADS = {
    Point.TRAINER_BIN_DONE: "step 1, micro-batch",
    Point.TRAINER_CHECKPOINT_WRITTEN: "the checkpoint of step 1",
    Point.TRAINER_WEIGHTS_WRITTEN: "writing version 0",
}


def stalls(life: Life) -> list[TrainerStalled]:
    return [event for event in life.stage.events if isinstance(event, TrainerStalled)]


async def stalled(life: Life, count: int) -> TrainerStalled:
    await life.stage.follower.wait_for(lambda _: len(stalls(life)) == count, WAIT_S)
    return stalls(life)[-1]


async def hangs(life: Life, point: Point) -> None:
    """Let a trainer hang in a thread until its process ends by itself."""
    pid = await life.trainer(BOMBUS_HANG_AT=point)
    ended = await life.ended(pid, within_s=2 * WAIT_S)
    said = life.log(pid)
    assert (ended.code, ended.signal) == (EXIT_HUNG, 0), said
    assert f"hangs at {point}" in said
    assert "has made no progress for" in said
    assert "in _happen" in said, "the log says where each thread was"


@long_only
async def test_r11_a_trainer_whose_thread_hangs_is_replaced_and_each_step_is_made_once_with_the_same_bytes(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    limits: dict[str, Any] = {"stall_s": STALL_S, "operation_timeout_s": STALL_S}
    async with running(nats_url, hive, tmp_path / "hung", forge, **limits) as life:
        for number, (point, doing) in enumerate(reversed(THREADS.items()), 1):
            await hangs(life, point)
            event = await stalled(life, number)
            assert event.doing.startswith(doing), event
            assert not event.silent
        assert [event.failures for event in stalls(life)] == [1, 1, 2], "a new batch counts anew"
        await life.dies(Point.TRAINER_WEIGHTS_PRUNED, 2)
        found = life.digests()
        opened = [event.trainer_epoch for event in life.stage.events if isinstance(event, TrainerOpened)]
        assert opened == [1, 3, 5, 7], "the epochs of those that hung are over"
    assert found == await undisturbed(nats_url, hive, tmp_path, forge, len(found), stall_s=STALL_S)


async def test_r11_a_trainer_that_is_stopped_as_a_whole_is_told_of_and_does_no_harm_when_it_comes_back(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    async with running(nats_url, hive, tmp_path / "stopped", forge, stall_s=STALL_S) as life:
        zombie = await life.freezes(Point.TRAINER_BIN_DONE)
        event = await stalled(life, 1)
        assert (event.silent, event.failures, event.trainer_epoch) == (True, 1, 1)
        batch = life.stage.engine.batch
        assert batch is not None
        assert life.stage.engine.trainer == ""
        await life.trainer()
        await life.version(batch.step + 1)
        os.kill(zombie, signal.SIGCONT)
        assert (await life.ended(zombie)).by(signal.SIGKILL, Point.TRAINER_SUPERSEDED)
        await life.version(life.stage.engine.version + 1)
        life.digests()
        assert len(stalls(life)) == 1


async def test_a_trainer_that_comes_back_and_finds_no_successor_goes_on_itself(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    async with running(nats_url, hive, tmp_path / "back", forge, stall_s=STALL_S, presence_s=3600.0) as life:
        pid = await life.trainer(BOMBUS_STOP_AT=Point.TRAINER_UPDATE_DONE)
        assert (await life.ended(pid)).by(signal.SIGSTOP, Point.TRAINER_UPDATE_DONE)
        await stalled(life, 1)
        os.kill(pid, signal.SIGCONT)
        await life.version(2)
        life.digests()


async def test_a_load_that_hangs_is_ended_before_the_boot_fails_and_tried_again(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    async with running(nats_url, hive, tmp_path / "load", forge, stall_s=4.0) as life:
        await hangs(life, Point.TRAINER_MODEL_LOADING)
        event = await stalled(life, 1)
        assert (event.doing, event.failures) == ("loading the model", 1)
        assert life.stage.engine.phase == Phase.BOOTING, "it has its time to boot again"
        life.stage.options = life.stage.options.model_copy(update={"stall_s": 600.0})
        await life.trainer()
        await life.version(1)
        life.digests()


async def test_the_status_says_how_far_a_step_is_and_that_a_stopped_trainer_does_not_answer(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    async with running(nats_url, hive, tmp_path / "asked", forge) as life:
        pid = await life.trainer(BOMBUS_HANG_AT=Point.TRAINER_BIN_DONE)
        async with asyncio.timeout(WAIT_S):
            while "step 1, micro-batch" not in (shown := await status(nats_url, hive)):
                pass
        assert re.search(r"^at work:\n  main   step 1, micro-batch \d of \d$", shown, re.MULTILINE)
        os.kill(pid, signal.SIGSTOP)
        assert re.search(r"^  main   trainer \S+ does not answer$", await status(nats_url, hive), re.MULTILINE)


async def status(url: str, hive: str) -> str:
    command = [sys.executable, "-m", "bombus", "status", "--nats", url, "--hive", hive]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=WAIT_S)
    return done.stdout
