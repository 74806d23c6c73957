"""Work in AWS trains a model, through every service and without a network. It needs `pip install 'bombus[aws]'`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ministack")
pytest.importorskip("awscli")

from bombus import Job, SwarmClient
from bombus.environments.budgets import RolloutBudgets
from bombus.environments.kinds import Transcript
from bombus.environments.plain.marks import reward
from bombus.environments.rollout import Rollout
from bombus.hive.events import StepCompleted
from bombus.tasks.aws.environment import AwsEnvironment
from bombus.tasks.kinds import TaskDraw
from bombus.tasks.registry import open_tasks
from tests.patience import wait_until
from tests.system.test_up import Up, newest_run

LENGTHS = {"max_prompt_length": 1600, "max_response_length": 400, "max_response_length_in_one_turn": 24}


class Lettered(AwsEnvironment):
    """An account in which a model that knows no AWS yet has something to learn: the letters before n."""

    @reward(weight=0.1)
    def letters(self, transcript: Transcript) -> float:
        said = "".join(str(message.get("content")) for message in transcript.messages if message["role"] == "assistant")
        return sum("a" <= each < "n" for each in said) / max(1, len(said))


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    running = Up(tmp_path)
    yield running
    assert running.interrupt() == []


def test_warmup_trains_end_to_end_on_a_tiny_model_and_its_accounts_are_simulated(up: Up) -> None:
    tasks = open_tasks("aws:warmup")
    rollout = Rollout(Lettered, RolloutBudgets(turns_max=2), sampling={"max_tokens": 24})
    with SwarmClient(up.url, verbose=False) as client:
        job = Job(
            model="tiny", batch_size=2, num_repeat=4, lr=1e-3, max_model_len=2048,
            bombus={"rollout": LENGTHS, "trainer": {"resume": "never"}},
        )  # fmt: skip
        client.auto_sync_train_config_and_start_engine(job)
        groups = [
            client.run_group(task, rollout, 4, max_workers=2, replace_infra=4)
            for task in tasks.draw(TaskDraw(size=2, seed=0))
        ]
        assert [output is not None for group in groups for output in group] == [True] * 8
        wait_until(lambda: client.get_global_step() == 1)
        client.wait_for_status("ENGINE.ROLLING")
        assert not client.lost_episodes
        (step,) = [event for event in asyncio.run(newest_run(up)) if isinstance(event, StepCompleted)]
        assert step.metrics["grad_norm"] > 0
        outputs = client.run_group(tasks.draw(TaskDraw(size=1, seed=1))[0], rollout, 1, episode_type="eval")
        assert outputs[0] is not None, "the new weights are served"
        client.stop_engine()
