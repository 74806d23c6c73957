"""Rollouts against a whole hive: a real bus, coordinator and gateway, and a replica that is scripted."""

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from bombus import AsyncSwarmClient, Credentials, SwarmClient, Task, WorkflowOutput
from bombus.environments.budgets import RolloutBudgets
from bombus.environments.kinds import RolloutStatus
from bombus.environments.pools.blocking import EnvPool
from bombus.environments.pools.session import SessionSettings
from bombus.environments.rollout import Rollout
from bombus.hive.events import AbortReason
from bombus.hive.generation import Generate
from bombus.hive.records import CallRecord, decode_record, unpack_tokens
from tests.environments.serving.served import ServerProcess
from tests.environments.small_environments import Counter
from tests.gateway.openai_hive import TEXT, GatewayHive, Send, says
from tests.patience import until

JOB: dict[str, Any] = {
    "bombus": {
        "model": {"path": "models/bumble", "tools": "hermes"},
        "rollout": {
            "num_repeat": 2,
            "max_prompt_length": 1200,
            "max_response_length": 800,
            "max_response_length_in_one_turn": 200,
        },
        "collection": {"batch_size": 2},
    }
}
TASK = Task(task_id="t1", metadata={"goal": 3})


def writes(name: str, **arguments: Any) -> str:
    """Return a tool call as the model of these tests writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def records_of(served: GatewayHive, episode: str) -> Sequence[CallRecord]:
    """Return the calls of an episode in the pool, in order."""
    await served.until(lambda engine: episode in engine.pool)
    refs = served.engine.pool[episode].calls
    stored = await served.bus.get_many(served.bus.subjects.calls_stream, [ref.seq for ref in refs])
    return [decode_record(found.data, ref) for found, ref in zip(stored, refs, strict=True)]


async def test_turns_with_tools_are_one_sequence_in_which_no_result_of_a_tool_is_trained(
    served: GatewayHive, client: AsyncSwarmClient
) -> None:
    said = [writes("add", amount=1), writes("fail"), writes("add", amount=2), "It is three."]
    served.replica.scripts.extend(says(text) for text in said)
    (output,) = await client.run_group(TASK, Rollout(Counter), 1)
    assert output is not None
    assert (output.reward, output.is_success) == (1.5, True)
    (episode,) = served.engine.pool
    records = await records_of(served, episode)
    sampled = [TEXT.tokenizer.decode(record.choices[0].token_ids()) for record in records]
    given = [TEXT.tokenizer.decode(unpack_tokens(record.prompt_tail)) for record in records]
    assert [text.removesuffix("<|im_end|>") for text in sampled] == said, "only the model's own tokens are sampled"
    assert [record.parent.id if record.parent else None for record in records] == [
        None,
        *(record.id for record in records[:-1]),
    ]
    shown = ['{"count":1}', "<error>Tool failed: ValueError: as it was asked to</error>", '{"count":3}']
    for text, prompt in zip(shown, given[1:]):
        assert text in prompt
        assert all(text not in answer for answer in sampled)
    assert served.engine.pool[episode].reward == 1.5


async def test_b1_the_hive_keeps_the_budget_of_tokens_exactly(served: GatewayHive, client: AsyncSwarmClient) -> None:
    served.replica.otherwise = says(writes("add", amount=0))
    claimed = (await client.begin_episodes(1, task_id="t1"))[0]
    result = await Rollout(Counter, RolloutBudgets(tokens_max=1500, turns_max=50)).play(TASK, claimed)
    assert result.status == RolloutStatus.TRUNCATED
    assert result.transcript.turns > 2
    records = await served.records(claimed.episode, result.transcript.turns)
    assert all(record.prompt_tokens + record.sampling.max_tokens <= 1500 for record in records)
    await client.abort_episode(claimed.episode_uuid)


async def test_the_same_rollout_serves_both_clients(served: GatewayHive, client: AsyncSwarmClient) -> None:
    served.replica.otherwise = says("done")
    rollout = Rollout(Counter)

    def threaded() -> list[WorkflowOutput | None]:
        with SwarmClient(served.base_url, verbose=False) as client:
            return client.run_group(TASK, rollout, 2)

    for outputs in (await client.run_group(TASK, rollout, 2), await asyncio.to_thread(threaded)):
        assert [output.reward for output in outputs if output] == [-0.5, -0.5]


# ---- holes in a group ----


class Fragile(Counter):
    """Breaks so often before it works."""

    left = 0

    def reset(self, task: Task) -> str:
        if Fragile.left > 0:
            Fragile.left -= 1
            raise OSError("the simulator did not start")
        return super().reset(task)


async def grouped(
    served: GatewayHive, kind: str, replace_infra: int
) -> tuple[list[WorkflowOutput | None], dict[str, int]]:
    """Run a group of two with either client. Returns the outputs and what was lost."""
    served.replica.otherwise = says("done")
    rollout = Rollout(Fragile)
    if kind == "async":
        async with AsyncSwarmClient(served.base_url, verbose=False) as client:
            return await client.run_group(TASK, rollout, 2, replace_infra=replace_infra), dict(client.lost_episodes)

    def threaded() -> tuple[list[WorkflowOutput | None], dict[str, int]]:
        with SwarmClient(served.base_url, verbose=False) as client:
            return client.run_group(TASK, rollout, 2, replace_infra=replace_infra), dict(client.lost_episodes)

    return await asyncio.to_thread(threaded)


@pytest.mark.parametrize("kind", ["async", "threads"])
async def test_episodes_that_infrastructure_has_lost_are_claimed_again(
    served: GatewayHive, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    Fragile.left = 2
    with caplog.at_level(logging.WARNING, "bombus"):
        outputs, lost = await grouped(served, kind, replace_infra=2)
    assert [output.reward for output in outputs if output] == [-0.5, -0.5]
    assert lost == {"ResetFailed": 2}
    assert (
        "the group of task t1 has 2 of 2 episodes: 2 by ResetFailed were lost, of which 2 were replaced" in caplog.text
    )
    await served.until(lambda engine: not engine.open)
    reasons = [closed.aborted for closed in served.engine.closed.values()]
    assert sorted(reasons, key=str) == [None, None, AbortReason.INFRA, AbortReason.INFRA]


@pytest.mark.parametrize("kind", ["async", "threads"])
async def test_replacing_has_a_budget_and_what_is_missing_is_said(
    served: GatewayHive, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    Fragile.left = 2
    with caplog.at_level(logging.WARNING, "bombus"):
        outputs, lost = await grouped(served, kind, replace_infra=1)
    assert sorted(output is None for output in outputs) == [False, True]
    assert lost == {"ResetFailed": 2}
    assert "has 1 of 2 episodes: 2 by ResetFailed were lost, of which 1 were replaced" in caplog.text


async def test_an_agent_that_fails_by_itself_is_not_replaced(client: AsyncSwarmClient) -> None:
    played: list[str] = []

    async def agent(task: Task, credentials: Credentials) -> float:
        played.append(credentials.episode)
        if len(played) == 1:
            raise ValueError("a bug")
        return 1.0

    outputs = await client.run_group(TASK, agent, 2, replace_infra=5)
    assert len(played) == 2
    assert sum(output is None for output in outputs) == 1
    assert client.lost_episodes == {"ValueError": 1}


async def test_a_group_whose_environment_server_is_killed_is_completed_with_fresh_episodes(
    served: GatewayHive, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three episodes one has ended and two have acted once when the server is killed; another one takes its place.

    The environment is over after three calls of `add`, and worth a third for each, so that an episode that went on in a
    new environment, or that was ended where it broke, would have less than 1.
    """
    asked: dict[str, int] = {}  # calls of each episode
    held: set[str] = set()
    ended: list[str] = []
    there_again = asyncio.Event()

    async def adds(request: Generate, send: Send) -> None:
        asked[request.episode] = asked.get(request.episode, 0) + 1
        if request.episode in list(asked)[1:] and asked[request.episode] == 2 and not there_again.is_set():
            held.add(request.episode)
            await there_again.wait()
        await says(writes("add"))(request, send)

    served.replica.otherwise = adds
    server = await ServerProcess("--slots", "3").start()

    def played() -> tuple[list[WorkflowOutput | None], dict[str, int]]:
        async def agent(task: Task, credentials: Credentials) -> WorkflowOutput:
            output = await Rollout(pool.environment)(task, credentials)
            ended.append(credentials.episode)
            return output

        settings = SessionSettings(connect_s=60)
        with (
            EnvPool(server.url, 3, group_size=3, settings=settings) as pool,
            SwarmClient(served.base_url, verbose=False) as client,
        ):
            outputs = client.run_group(TASK, agent, 3, replace_infra=3)
            return outputs, dict(client.lost_episodes)

    with caplog.at_level(logging.WARNING, "bombus"):
        playing = asyncio.create_task(asyncio.to_thread(played))
        await until(lambda: len(held) == 2 and len(ended) == 1)
        await server.end()
        again = await ServerProcess("--slots", "3").start(server.port)
        there_again.set()
        try:
            outputs, lost = await playing
        finally:
            await again.end()
    assert [output.reward for output in outputs if output] == [1.0, 1.0, 1.0]
    assert lost == {"EnvironmentLost": 2}
    assert "has 3 of 3 episodes: 2 by EnvironmentLost were lost, of which 2 were replaced" in caplog.text
    await served.until(lambda engine: not engine.open)
    reasons = {episode: closed.aborted for episode, closed in served.engine.closed.items()}
    assert {episode for episode, reason in reasons.items() if reason == AbortReason.INFRA} == held
    assert list(reasons.values()).count(None) == 3
