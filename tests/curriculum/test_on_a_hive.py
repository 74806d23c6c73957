"""A curriculum gives the tasks of groups that a hive trains, and learns from what became of them."""

from pathlib import Path

from bombus import AsyncSwarmClient, Rollout, Task, Transcript, reward
from bombus.bus import Bus
from bombus.curriculum.curriculum import Curriculum
from bombus.curriculum.plan import plan_of
from bombus.curriculum.samplers import CurriculumSampler
from bombus.sdk.errors import InfraError
from tests.environments.test_rollout_on_a_hive import JOB
from tests.gateway.openai_hive import gateway_hive, says

TASKS = [
    Task(task_id="one", metadata={"tier": "warmup"}),
    Task(task_id="two", metadata={"tier": "beginner"}),
]


class Yes:
    """Wants to hear "yes". Every other world of it cannot be made."""

    made = 0

    def reset(self, task: Task) -> str:
        Yes.made += 1
        if Yes.made % 2:
            raise InfraError("there is no world")
        return task.task_id

    @reward
    def heard(self, transcript: Transcript) -> bool:
        return bool(transcript.messages[-1]["content"] == "yes")


async def test_groups_of_a_hive_are_fed_by_a_curriculum_and_recorded_once_each(bus: Bus, tmp_path: Path) -> None:
    job = {"bombus": {**JOB["bombus"], "collection": {"batch_size": 8}}}
    given: list[str] = []
    async with gateway_hive(bus, job) as served, AsyncSwarmClient(served.base_url, verbose=False) as client:
        served.replica.otherwise = says("yes")
        sampler = CurriculumSampler(Curriculum(plan_of(TASKS), tmp_path / "curriculum.jsonl"), TASKS)
        for _, task in zip(range(4), sampler):
            outputs = await client.run_group(task, Rollout(Yes), 2, replace_infra=4)
            sampler.record(task, outputs)
            given.append(task.task_id)
        await served.until(lambda engine: len(engine.pool) == 8)
        assert sorted(episode.task for episode in served.engine.pool.values()) == ["one"] * 6 + ["two"] * 2
        assert client.lost_episodes["InfraError"] > 0
    assert given == ["one", "one", "one", "two"], "three successes are the fast track to the next tier"
    sampler.curriculum.close()
    again = Curriculum(plan_of(TASKS), tmp_path / "curriculum.jsonl").figures()
    assert (again.tier, again.results) == ("beginner", 4)
