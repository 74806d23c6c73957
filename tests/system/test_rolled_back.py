"""Services of a release that is too old for a hive, as real processes."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import pytest

from bombus.bus import Bus
from bombus.hive import levels
from bombus.machine.process import free_port, kill
from tests.coordinator.test_shell import leading
from tests.patience import PATIENCE_S


async def refusal_of(*command: str) -> tuple[int | None, str]:
    """Return the exit status of a command that ends by itself, and what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bombus", *command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            kill(process)
    return process.returncode, said.decode()


async def test_after_the_level_was_raised_every_service_of_the_older_release_ends_and_says_what_to_do(
    bus: Bus, nats_url: str, hive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = levels.LEVEL
    with monkeypatch.context() as newer:
        newer.setattr(levels, "LEVEL", ours + 1)
        async with leading(bus, raise_level=True) as raised:
            assert raised.core.hive.level == ours + 1
    last = (await bus.state(bus.subjects.events_stream)).last_seq
    where = ("--nats", nats_url, "--hive", hive)
    services = (
        ("coordinator", *where),
        ("gateway", *where, "--port", str(free_port())),
        ("trainer", *where, "--folder", str(tmp_path)),
        ("inference", *where, "--port", str(free_port())),
        ("log", "check", *where),
        ("status", *where),
    )
    for command in services:
        code, said = await refusal_of(*command)
        assert code, f"{command[0]} went on"
        assert f"at feature level {ours + 1}" in said, said
        assert "upgrade bombus here, or restore a backup" in said, said
        assert "Traceback" not in said, said
    assert (await bus.state(bus.subjects.events_stream)).last_seq == last, "nothing was written"
