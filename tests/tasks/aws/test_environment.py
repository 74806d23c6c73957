"""Accounts in real simulators. They need packages of their own: `pip install 'bombus[aws]'`."""

import asyncio
import json
import os
import shlex
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("ministack")
pytest.importorskip("awscli")

from bombus.cli import main
from bombus.environments.backends.process import SimulatorProcess, ministack
from bombus.environments.kinds import ToolCall, Transcript
from bombus.environments.plain.environment import PlainEnvironment
from bombus.sdk.types import Task
from bombus.tasks.aws.catalogue import TASKS
from bombus.tasks.aws.environment import AwsEnvironment
from tests.tasks.model_server import Conversation, model_server

BUCKET = Task(metadata={"aws": "bucket"})


@pytest.fixture
async def simulator() -> AsyncIterator[SimulatorProcess]:
    backend = ministack(0, 0)
    await backend.start()
    yield backend
    await backend.stop()


async def test_each_task_begins_unsolved_and_is_solved_by_its_gold_commands(simulator: SimulatorProcess) -> None:
    for number, each in enumerate(TASKS):
        if number:
            await simulator.scrub()
        environment, task = AwsEnvironment(simulator), Task(metadata={"aws": each.name})
        await environment.reset(task)
        assert await environment.progress() < 1.0, each.name
        assert not await environment.is_done()
        *calls, _ = environment.gold(task)
        for call in calls:
            assert isinstance(call, tuple)
            shown = await environment.aws(call[1]["command"])
            assert "exit code" not in shown, (each.name, call, shown)
        assert (await environment.progress(), await environment.is_done()) == (1.0, True), each.name
        await environment.close()


async def test_parts_are_worth_08_of_their_share_and_what_is_broken_costs_all(simulator: SimulatorProcess) -> None:
    environment = AwsEnvironment(simulator)
    await environment.reset(Task(metadata={"aws": "private-bucket"}))
    await environment.aws("aws s3 mb s3://payroll")
    assert await environment.progress() == 0.0
    await environment.aws("aws s3api put-bucket-versioning --bucket payroll --versioning-configuration Status=Enabled")
    assert await environment.progress() == pytest.approx(0.8 / 3)
    await environment.close()
    await simulator.scrub()
    await environment.reset(Task(metadata={"aws": "clean-up"}))
    await environment.aws("aws s3 rb s3://archive-tmp")
    await environment.aws("aws s3 rb s3://tmp-a")
    await environment.aws("aws s3 rb s3://tmp-b")
    assert await environment.progress() == 0.0
    await environment.close()


async def test_an_account_has_its_score_where_the_last_command_was_cut_off(simulator: SimulatorProcess) -> None:
    environment = AwsEnvironment(simulator)
    await environment.reset(Task(metadata={"aws": "queue"}))
    await environment.aws("aws sqs create-queue --queue-name jobs")
    url = f"{simulator.address}/000000000000/jobs"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):  # as the limits of an episode do
            await environment.aws(f"aws sqs receive-message --wait-time-seconds 20 --queue-url {url}")
    assert (await environment.progress(), await environment.is_done()) == (1.0, True)
    await environment.close()


async def test_a_command_that_fails_or_is_refused_is_shown_and_counted(simulator: SimulatorProcess) -> None:
    environment = PlainEnvironment(lambda: AwsEnvironment(simulator))
    await environment.open(BUCKET)
    for command, said in (
        ("aws s3 rb s3://none", "(the command failed with exit code"),
        ("aws s3 nonsense", "aws s3 nonsense is not carried out here"),
        ("rm -rf /", "only commands of aws are carried out"),
        ("aws s3 mb s3://team-logs", "make_bucket: team-logs"),
    ):
        outcome = await environment.call(ToolCall(id="1", name="aws", arguments=json.dumps({"command": command})))
        assert said in outcome.text
    scores = await environment.score(Transcript())
    assert (scores.reward, scores.is_success, scores.metrics) == (1.0, True, {"failed_commands": 3.0})
    await environment.close()


async def test_a_command_that_takes_its_process_with_it_is_shown_and_the_episode_goes_on(
    simulator: SimulatorProcess,
) -> None:
    environment = AwsEnvironment(simulator)
    await environment.reset(BUCKET)
    assert environment._console is not None
    assert environment._console.pid is not None
    os.kill(environment._console.pid, signal.SIGKILL)
    assert "it was killed" in await environment.aws("aws s3 ls")
    assert await environment.aws("aws s3 mb s3://team-logs") == "make_bucket: team-logs"
    assert (await environment.progress(), environment.failed_commands()) == (1.0, 1.0)
    await environment.close()


async def test_eight_accounts_at_once_with_the_same_bucket_do_not_meet() -> None:
    environments = [AwsEnvironment() for _ in range(8)]
    try:
        await asyncio.gather(*(environment.reset(BUCKET) for environment in environments))
        await asyncio.gather(*(environment.aws("aws s3 mb s3://team-logs") for environment in environments))
        for number, environment in enumerate(environments):
            await environment.aws(f"aws s3 mb s3://only-{number}")
        for number, environment in enumerate(environments):
            names = await environment.aws("aws s3api list-buckets --query Buckets[].Name --output text")
            assert names.split() == [f"only-{number}", "team-logs"]
    finally:
        await asyncio.gather(*(environment.close() for environment in environments))


def test_a_run_of_a_tier_is_scored_by_the_state_of_its_accounts(tmp_path: Path) -> None:
    by_prompt = {task.prompt: task for task in TASKS}

    def solves(messages: Conversation) -> dict[str, object]:
        lines = by_prompt[messages[1]["content"]].gold
        done = sum(message["role"] == "tool" for message in messages)
        if done == len(lines):
            return {"role": "assistant", "content": "Done."}
        function = {"name": "aws", "arguments": json.dumps({"command": f"aws {lines[done]}"})}
        call = {"id": f"c{done}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    out = tmp_path / "out"
    with model_server(solves) as url:
        words = f"run --task aws:warmup --engine {url} -n 8 --at-once 2 --out {shlex.quote(str(out))}"
        assert main(shlex.split(words)) == 0
    scores = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(score["reward"], score["is_success"], score["tool_calls"]) for score in scores] == [(1.0, True, 1)] * 5
