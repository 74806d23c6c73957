"""Both clients and multi-model episodes, against a whole hive of two engines over real HTTP; and the operations by
hand."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bombus import AsyncSwarmClient, EpisodesFailed, InfraError, MultiModelEpisode, SwarmClient, Task, WorkflowOutput
from bombus.bus import Bus
from bombus.hive.events import AbortReason
from bombus.hive.failures import FailureKind
from bombus.hive.inbox import MultiModelClaim, Touch
from bombus.hive.state import EngineState
from bombus.sdk.errors import EngineOffline, EpisodeGone, NoEpisode, OtherOutcome
from bombus.sdk.multi_model import HiveCore
from bombus.sdk.requests import NoReply
from bombus.sdk.running import AgentResult
from tests.gateway.swarm_hive import PlayedHive, played_hive
from tests.patience import PATIENCE_S
from tests.sdk.test_core import Driver, no, ok

ROLES = {"planner": "main", "worker": "small"}
TASK = Task(task_id="t1", main_query="1+1")


@pytest.fixture
async def played(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus, engines=("main", "small")) as played:
        yield played


@pytest.fixture
async def small(played: PlayedHive) -> PlayedHive:
    await played.start()
    small = played.other("small")
    await small.start()
    return small


@pytest.fixture
async def url(played: PlayedHive, small: PlayedHive) -> AsyncIterator[str]:
    async with played.served() as url:
        yield url


async def test_a_threaded_client_plays_a_multi_model_episode_with_the_credentials_of_each_role(
    played: PlayedHive, small: PlayedHive, url: str
) -> None:
    with SwarmClient(url, engine="small") as client:
        multi = await asyncio.to_thread(client.begin_multi_model_episode, ROLES)
        assert multi.engines == ROLES
        assert multi.episode == "main-1-1 + small-1-1"
        assert "secret" not in repr(multi)
        assert multi["planner"].base_url == f"{url}/v1"
        assert played.gateway.keys.verify(multi["planner"].api_key, 0).episode == "main-1-1"
        assert played.gateway.keys.verify(multi["worker"].api_key, 0).episode == "small-1-1"
        results: dict[str, AgentResult] = {"planner": WorkflowOutput(reward=0.5, is_success=True), "worker": 1.0}
        await asyncio.to_thread(client.end_multi_model_episode, TASK, multi, results)
        await asyncio.to_thread(client.end_multi_model_episode, TASK, multi, results)
        with pytest.raises(OtherOutcome):
            await asyncio.to_thread(client.end_multi_model_episode, TASK, multi, results | {"worker": 0.0})
    pools = {**played.engine.pool, **small.engine.pool}
    assert {name: (done.task, done.reward) for name, done in pools.items()} == {
        "main-1-1": ("t1", 0.5),
        "small-1-1": ("t1", 1.0),
    }


async def test_the_async_client_does_the_same(played: PlayedHive, small: PlayedHive, url: str) -> None:
    async with AsyncSwarmClient(url) as client:
        first, second = await client.begin_multi_model_episodes(2, ROLES, task_id="t1")
        async with client.keep_multi_model_alive(first, every_s=0.01):
            await played.until_received(lambda message: isinstance(message, Touch) and "main-1-1" in message.episodes)
        await client.end_multi_model_episodes([(TASK, first, {"planner": 0.0, "worker": 0.0})])
        await client.abort_multi_model_episode(second, failure=FailureKind.SANDBOX, detail="the sandbox is gone")
        assert await client.touch_multi_model_episodes([first, second]) == [first, second]
        with pytest.raises(EpisodeGone):
            await client.end_multi_model_episode(TASK, second, {"planner": 0.0, "worker": 0.0})
    assert list(small.engine.pool) == ["small-1-1"]
    assert small.engine.closed["small-1-2"].aborted == AbortReason.MULTI_MODEL
    assert not played.engine.open


async def test_a_heartbeat_in_a_thread_keeps_a_multi_model_episode(played: PlayedHive, url: str) -> None:
    with SwarmClient(url) as client:
        multi = await asyncio.to_thread(client.begin_multi_model_episode, ROLES)
        with client.keep_multi_model_alive(multi, every_s=0.01):
            await played.until_received(lambda message: isinstance(message, Touch) and "main-1-1" in message.episodes)
        for thread in threading.enumerate():
            if thread.name == "bombus-keep-alive":  # its last heartbeat is under way
                await asyncio.to_thread(thread.join, PATIENCE_S)
        await asyncio.to_thread(client.abort_multi_model_episode, multi)


def agents(task: Task, multi: MultiModelEpisode) -> dict[str, float]:
    number = multi["planner"].episode.rpartition("-")[2]
    if number == "1":
        raise InfraError("the sandbox is gone")
    if number == "2":
        return {"planner": 1.0}  # no result for the worker
    return {"planner": 1.0, "worker": 0.25}


async def test_a_group_ends_what_its_agents_finished_and_aborts_the_rest_on_all_engines(
    played: PlayedHive, small: PlayedHive, url: str
) -> None:
    with SwarmClient(url) as client:
        results = await asyncio.to_thread(client.run_multi_model_group, TASK, agents, 3, ROLES)
        assert results == [None, None, {"planner": 1.0, "worker": 0.25}]
    assert list(small.engine.pool) == ["small-1-3"]
    assert {name: closed.aborted for name, closed in played.engine.closed.items()} == {
        "main-1-1": AbortReason.INFRA,
        "main-1-2": AbortReason.CLIENT,
        "main-1-3": None,
    }
    assert not small.engine.open


async def test_the_async_group_does_the_same_and_fails_when_all_agents_do(
    played: PlayedHive, small: PlayedHive, url: str
) -> None:
    async def agents_of(task: Task, multi: MultiModelEpisode) -> dict[str, float]:
        return agents(task, multi)

    async def failing(task: Task, multi: MultiModelEpisode) -> dict[str, float]:
        raise ValueError(multi.episode)

    async with AsyncSwarmClient(url) as client:
        results = await client.run_multi_model_group(TASK, agents_of, 3, ROLES)
        assert [result is not None for result in results] == [False, False, True]
        with pytest.raises(EpisodesFailed):
            await client.run_multi_model_group(TASK, failing, 2, ROLES)
    assert not played.engine.open
    assert not small.engine.open


@pytest.mark.parametrize("kind", ["async", "threads"])
async def test_multi_model_episodes_that_are_lost_are_replaced_and_counted(
    played: PlayedHive, small: PlayedHive, url: str, kind: str
) -> None:
    async def agent(client: SwarmClient | AsyncSwarmClient, multi: MultiModelEpisode) -> dict[str, AgentResult]:
        number = multi["planner"].episode.rpartition("-")[2]
        if number == "1":
            raise InfraError("the sandbox is gone")
        if number == "2":  # as the hive does where a part of it is taken back
            aborting = client.abort_multi_model_episode(multi, failure=FailureKind.SANDBOX)
            if aborting is not None:
                await aborting
        return {"planner": 1.0, "worker": 1e10 if number == "3" else 0.5}

    def threaded() -> tuple[list[Any], dict[str, int]]:
        with SwarmClient(url) as client:
            run = client.run_multi_model_group(TASK, lambda _, multi: agent(client, multi), 4, ROLES, replace_infra=2)
            return run, dict(client.lost_episodes)

    if kind == "threads":
        results, lost = await asyncio.to_thread(threaded)
    else:
        async with AsyncSwarmClient(url) as client:
            results = await client.run_multi_model_group(
                TASK, lambda _, multi: agent(client, multi), 4, ROLES, replace_infra=2
            )
            lost = dict(client.lost_episodes)
    whole = {"planner": 1.0, "worker": 0.5}
    assert (results.count(whole), results.count(None)) == (3, 1)
    assert lost == {"InfraError": 1, "EpisodeGone": 1, "BadReward": 1}
    assert len(played.engine.pool) == len(small.engine.pool) == 3
    assert not played.engine.open
    assert not small.engine.open


async def test_a_cancelled_group_gives_its_multi_model_episodes_back(
    played: PlayedHive, small: PlayedHive, url: str
) -> None:
    begun = asyncio.Event()

    async def endless(task: Task, multi: MultiModelEpisode) -> dict[str, float]:
        begun.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async with AsyncSwarmClient(url, engine="small") as client:
        group = asyncio.create_task(client.run_multi_model_group(TASK, endless, 2, ROLES))
        await begun.wait()
        group.cancel()
        await asyncio.gather(group, return_exceptions=True)
    await played.gateway.follower.wait_for(lambda _: not _open(played.engine, small.engine), PATIENCE_S)


async def test_a_claim_that_is_cancelled_while_it_waits_leaves_nothing_open(
    played: PlayedHive, small: PlayedHive, url: str
) -> None:
    async with AsyncSwarmClient(url) as client:
        full = await client.begin_multi_model_episodes(8, ROLES)
        waiting = asyncio.create_task(client.begin_multi_model_episode(ROLES))
        received = lambda message: isinstance(message, MultiModelClaim) and message.count == 1  # noqa: E731
        await played.until_received(received)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        for multi in full:
            await client.abort_multi_model_episode(multi)
        again = await client.begin_multi_model_episodes(8, ROLES, max_wait_s=PATIENCE_S)
        assert len(again) == 8
        assert _open(played.engine, small.engine) == 16


def _open(*engines: EngineState) -> int:
    return sum(len(engine.open) for engine in engines)


# ---- by hand ----

PART = {"openai_base_url": "http://inside:1/v1", "openai_api_key": "sk-1"}
GRANTED = {
    "success": True,
    "multi_model_episodes": [
        {"main": {**PART, "episode_uuid": "main-1-1.s"}, "small": {**PART, "episode_uuid": "small-1-1.s"}}
    ],
    "engines": {"main": {"model": "tiny"}, "small": {"model": "tiny"}},
}


class MultiModelDriver(Driver):
    """Drives the operations of multi-model episodes."""

    def __init__(self, replies: Any, at: str = "http://hive:10086") -> None:
        super().__init__(replies, at=at, kind=HiveCore)

    @property
    def multi(self) -> HiveCore:
        assert isinstance(self.core, HiveCore)
        return self.core

    def paths(self) -> list[str]:
        return [request.path for request in self.sent]


@pytest.mark.parametrize("at", ["http://hive:10086", "http://hive:10086/e/small", "http://hive:10086/e/main/"])
def test_the_routes_are_at_the_hives_root_whatever_the_clients_engine_is(at: str) -> None:
    driver = MultiModelDriver([ok(GRANTED), ok({})], at)
    (multi,) = driver.run(driver.multi.begin_multi_model_episodes(1, ROLES))
    driver.run(driver.multi.abort_multi_model_episode(multi))
    assert driver.paths() == [
        "http://hive:10086/claim_multi_model_episodes",
        "http://hive:10086/abort_multi_model_episodes",
    ]
    assert multi["worker"].base_url == "http://hive:10086/v1", "the address at which the client reaches the hive"


def test_a_claim_whose_reply_was_lost_is_sent_again_under_its_id() -> None:
    driver = MultiModelDriver([NoReply("cut off"), ok(GRANTED)])
    driver.run(driver.multi.begin_multi_model_episodes(1, ROLES))
    first, second = driver.sent
    assert first == second


def test_an_interrupted_claim_asks_again_what_it_was_granted_and_gives_it_back() -> None:
    driver = MultiModelDriver([KeyboardInterrupt(), ok(GRANTED), ok({})])
    with pytest.raises(KeyboardInterrupt):
        driver.run(driver.multi.begin_multi_model_episodes(1, ROLES))
    assert driver.paths()[1:] == [
        "http://hive:10086/claim_multi_model_episodes",
        "http://hive:10086/abort_multi_model_episodes",
    ]
    assert b"small-1-1.s" in driver.sent[2].body


def test_an_offline_engine_and_a_long_wait_are_errors() -> None:
    offline = {"success": False, "fail_cause": "Engine small: it is off", "engine_status": "ENGINE.OFFLINE"}
    with pytest.raises(EngineOffline, match="Engine small"):
        _begin(offline)
    full = offline | {"engine_status": "ENGINE.ROLLING"}
    with pytest.raises(NoEpisode):
        _begin(full, max_wait_s=0.0)


def _begin(reply: dict[str, Any], **options: Any) -> None:
    driver = MultiModelDriver([ok(reply)])
    driver.run(driver.multi.begin_multi_model_episodes(1, ROLES, **options))


def test_roles_without_an_engine_of_their_own_are_refused_before_anything_is_sent() -> None:
    driver = MultiModelDriver([])
    for wrong in ({"planner": "main"}, {"planner": "main", "worker": "main"}, {}):
        with pytest.raises(ValueError, match="two or more engines"):
            driver.run(driver.multi.begin_multi_model_episodes(1, wrong))


def test_a_report_that_lacks_a_role_is_refused_before_anything_is_sent() -> None:
    driver = MultiModelDriver([ok(GRANTED)])
    (multi,) = driver.run(driver.multi.begin_multi_model_episodes(1, ROLES))
    with pytest.raises(ValueError, match=r"\['planner', 'worker'\], but there are results for \['planner'\]"):
        driver.run(driver.multi.end_multi_model_episodes([(TASK, multi, {"planner": 1.0})]))
    assert len(driver.sent) == 1


def test_a_multi_model_episode_that_took_too_long_is_aborted_instead_of_ended() -> None:
    driver = MultiModelDriver([ok(GRANTED), ok({})])
    (multi,) = driver.run(driver.multi.begin_multi_model_episodes(1, ROLES, max_episode_time=10.0))
    driver.now += 11
    driver.run(driver.multi.end_multi_model_episodes([(TASK, multi, {"planner": 1.0, "worker": 1.0})]))
    assert driver.paths()[1:] == ["http://hive:10086/abort_multi_model_episodes"]


def test_an_interrupted_program_gives_up_multi_model_episodes_and_others_by_their_own_routes() -> None:
    driver = MultiModelDriver([ok(GRANTED), ok({}), no(500, "internal")])
    driver.run(driver.multi.begin_multi_model_episodes(1, ROLES))
    driver.run(driver.claimed.give_up(["main-1-1.s", "main-1-9.s"], driver.send))
    assert driver.paths()[1:] == ["http://hive:10086/abort_multi_model_episodes", "/abort_episodes"]
