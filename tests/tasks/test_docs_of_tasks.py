"""The programs of docs/tasks.md run as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from bombus.bus import Bus
from tests.environments.test_rollout_on_a_hive import JOB
from tests.gateway.openai_hive import gateway_hive

PAGE = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
TRAINING, CURRICULUM = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


async def test_the_program_of_the_page_plays_groups_of_what_its_sampler_gives(bus: Bus) -> None:
    job = {"bombus": {**JOB["bombus"], "collection": {"batch_size": 4}}}
    names: dict[str, Any] = {}
    async with gateway_hive(bus, job) as served:
        exec(TRAINING.replace("http://127.0.0.1:10086", served.base_url), names)
        await names["train"](2)
        await served.until(lambda engine: len(engine.pool) == 16)
        tasks = {episode.task for episode in served.engine.pool.values()}
    assert len(tasks) == 2
    assert all(task.startswith("reasoning_gym:leg_counting/train/0/") for task in tasks)


def test_the_curriculum_of_the_page_gives_its_first_tier_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(CURRICULUM, names)
    assert [next(names["sampler"]).task_id for _ in range(3)] == ["add", "add", "add"]
