"""The environments of `aws` behind a server, on a pool of simulators that are scrubbed between episodes."""

import asyncio
import sys

import pytest

pytest.importorskip("ministack")
pytest.importorskip("awscli")

from bombus.environments.kinds import ToolCall, Transcript
from bombus.environments.pools.aio import AsyncEnvPool
from bombus.sdk.types import Task

BUCKET = Task(task_id="b", metadata={"aws": "bucket"})
MAKE = {"tool": "aws", "arguments": {"command": "aws s3 mb s3://team-logs"}}
SERVE = "env serve bombus.tasks.aws.environment:AwsEnvironment --slots 2 --backend ministack --port 0 --trusted-network"


async def test_a_pool_of_simulators_gives_each_session_an_account_that_is_new() -> None:
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bombus", *SERVE.split(), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        url = (await asyncio.wait_for(server.stdout.readline(), 60)).decode().split()[-1]
        for _ in range(2):
            async with AsyncEnvPool(url, 2, group_size=2) as pool:
                await pool.reset_group(BUCKET)
                await pool.run_group_step([MAKE, MAKE])
        async with AsyncEnvPool(url, 2, group_size=2) as pool:
            environment = pool.environment()
            await environment.open(BUCKET)
            assert (await environment.score(Transcript())).reward == 0.0
            outcome = await environment.call(
                ToolCall(id="1", name="aws", arguments='{"command": "aws s3 mb s3://team-logs"}')
            )
            assert (outcome.text, outcome.failed) == ("make_bucket: team-logs", False)
            assert (await environment.score(Transcript())).reward == 1.0
            await environment.close()
    finally:
        server.terminate()
        await server.wait()
