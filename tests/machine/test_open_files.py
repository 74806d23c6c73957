"""A process that may open no more files says so once, and says when it may again."""

import asyncio
import logging
import resource

import pytest

from bombus.machine import open_files
from tests.patience import PATIENCE_S


async def test_want_of_open_files_and_its_end_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    caplog.set_level(logging.WARNING, "bombus.machine.open_files")
    watching = asyncio.create_task(open_files.watch(every_s=0))
    try:
        for limit, said in ((3, 1), (soft, 2)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            async with asyncio.timeout(PATIENCE_S):
                while len(caplog.records) < said:
                    await asyncio.sleep(0)
            for _ in range(10):  # looks
                await asyncio.sleep(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        watching.cancel()
    short, again = [record.getMessage() for record in caplog.records]
    assert short.startswith("Too many open files: no connection can be accepted or made")
    assert "The limit of this process is 3: raise it with `ulimit -n`" in short
    assert again == "files and connections can be opened again"
