"""The watchdog between real processes: a child that is stopped or hangs is killed and started again."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bombus.host.layout import Layout, Service, services
from bombus.host.supervisor import Child
from bombus.machine.watchdog import PERIOD, SOCKET, keep_alive, watchdog

LIMIT_S = 2.0
WAIT_S = 30.0
# Says that it lives, writes its number of lives, and in its first life does what it is told.
CHILD = """
import asyncio, os, signal, sys, time
from pathlib import Path
from bombus.machine.process import run_service

async def main():
    lives = Path(sys.argv[1])
    with lives.open("a") as file:
        file.write("x")
    if lives.read_text() == "x":
        await asyncio.sleep(0.1)
        exec(sys.argv[2])
    await asyncio.Event().wait()

sys.exit(run_service(main()))
"""


@asynccontextmanager
async def kept(lives: Path, deed: str) -> AsyncIterator[Child]:
    """Keep a child running that does this deed in its first life."""
    environment = {**os.environ, "BOMBUS_PARENT": str(os.getpid())}
    command = (sys.executable, "-c", CHILD, str(lives), deed)
    child = Child(Service("trainer", "trainer main", command, environment, silence_s=LIMIT_S))
    keeping = asyncio.create_task(child.keep_running())
    try:
        yield child
    finally:
        await child.stop()
        await keeping


async def until_lives(lives: Path, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while not lives.exists() or len(lives.read_text()) < count:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("deed", ["os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(3600)"])
async def test_a_child_that_is_stopped_or_blocks_its_event_loop_is_killed_and_started_again(
    tmp_path: Path, deed: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with kept(tmp_path / "lives", deed):
        await until_lives(tmp_path / "lives", 2)
    assert "trainer main has been silent for 2 s: killing it" in caplog.text


async def test_a_child_that_says_that_it_lives_is_left_alone_for_many_times_its_limit(tmp_path: Path) -> None:
    with watchdog(0.4, start_s=0.4) as watching:
        os.environ.update(watching.environment)
        try:
            alive = asyncio.create_task(keep_alive())
            silence = asyncio.create_task(watching.until_silent())
            done, _ = await asyncio.wait({silence}, timeout=2.0)
            assert not done
            alive.cancel()
            await asyncio.wait_for(silence, WAIT_S)
        finally:
            for name in watching.environment:
                del os.environ[name]


async def test_without_a_supervisor_that_asks_a_process_says_nothing() -> None:
    assert SOCKET not in os.environ
    await keep_alive()


def test_a_process_has_as_long_for_its_first_word_as_it_may_take_to_start() -> None:
    with watchdog(5.0) as watching:
        assert watching.environment[PERIOD] == "5000000"
        assert len(watching.environment[SOCKET].encode()) < 108


def test_trainers_and_gateways_have_watchdogs_and_none_has_that_of_the_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SOCKET, "/run/systemd/notify")
    planned = services(Layout(), "nats://127.0.0.1:4222")
    assert {service.kind for service in planned if service.silence_s} == {"trainer", "gateway"}
    assert all(SOCKET not in service.environment for service in planned)
