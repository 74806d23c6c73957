"""The programs of docs/pools.md run, against a server of the class that the page serves."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from bombus.environments.loading import load_class
from tests.environments.serving.served import served

ROOT = Path(__file__).parents[3]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/pools.md").read_text(), re.DOTALL)


async def test_the_programs_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    names: dict[str, Any] = {}
    async with served(load_class("guess_number:GuessNumber"), slots=8) as (server, url):
        together, alone = (program.replace("http://127.0.0.1:8000", url) for program in PROGRAMS)
        await asyncio.to_thread(exec, together, names)
        assert len({step.observation["text"] for step in names["steps"]}) == 1, "one task for all"
        async with asyncio.timeout(60):
            while len(server.table.free) < 8:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(exec, alone, names)
    assert names["rewards"] == [0.0] * 8 or names["rewards"] == [1.0] * 8
