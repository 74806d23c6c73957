"""Multi-model episodes over HTTP: the hive's routes that claim, end, abort and touch one episode on each of two
engines."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from bombus.bus import Bus
from bombus.hive.episodes import without_secret
from bombus.hive.events import AbortReason
from bombus.hive.inbox import Touch
from bombus.hive.state import Phase
from bombus.machine.hive_keys import HiveKeys
from tests.gateway.swarm_hive import PlayedHive, played_hive
from tests.patience import PATIENCE_S

ENGINES = ("main", "small")


@pytest.fixture
async def played(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus, engines=ENGINES) as played:
        yield played


@pytest.fixture
async def small(played: PlayedHive) -> PlayedHive:
    await played.start()
    small = played.other("small")
    await small.start()
    return small


async def claim(played: PlayedHive, client: str = "c1", name: str = "one", **more: object) -> dict[str, Any]:
    body = {"client_uuid": client, "claim_id": name, "engines": [*ENGINES], "wait_s": 0.0, **more}
    reply: dict[str, Any] = (await played.post("/claim_multi_model_episodes", body)).json()
    return reply


def report(multi: dict[str, Any], reward: float = 1.0, task: str = "t1") -> list[dict[str, Any]]:
    output = {"reward": reward, "metadata": {}}
    return [{"episode_uuid": one["episode_uuid"], "task_id": task, "workflow_output": output} for one in multi.values()]


async def end(played: PlayedHive, *several: dict[str, Any], reward: float = 1.0, client: str = "c1") -> httpx.Response:
    body = {"client_uuid": client, "multi_model_episodes": [report(multi, reward) for multi in several]}
    return await played.post("/end_multi_model_episodes", body)


async def test_a_multi_model_claim_returns_what_each_engines_agent_needs(played: PlayedHive, small: PlayedHive) -> None:
    reply = await claim(played, count=2, task_id="t1")
    assert reply["success"], reply
    first, second = reply["multi_model_episodes"]
    assert [without_secret(one["episode_uuid"]) for one in first.values()] == ["main-1-1", "small-1-1"]
    assert [without_secret(one["episode_uuid"]) for one in second.values()] == ["main-1-2", "small-1-2"]
    assert all(one["openai_base_url"] == "http://hive.test:10086/v1" for one in first.values())
    claims = {name: played.gateway.keys.verify(one["openai_api_key"], 0) for name, one in first.items()}
    assert {name: (key.engine, key.episode) for name, key in claims.items()} == {
        "main": ("main", "main-1-1"),
        "small": ("small", "small-1-1"),
    }
    assert reply["engines"] == {name: {"policy_version": 0, "model": "tiny"} for name in ENGINES}
    assert (reply["discard_episode_timeout"], reply["client_silence_s"]) == (240.0, 15.0)
    assert await claim(played, count=2, task_id="t1") == reply, "the same claim gets the same multi-model episodes"
    assert set(small.engine.open) == {"small-1-1", "small-1-2"}


async def test_multi_model_episodes_end_together_and_the_same_report_again_is_a_success(
    played: PlayedHive, small: PlayedHive
) -> None:
    several = (await claim(played, count=2))["multi_model_episodes"]
    assert (await end(played, *several)).json() == {"success": True}
    assert list(played.engine.pool) == ["main-1-1", "main-1-2"]
    assert list(small.engine.pool) == ["small-1-1", "small-1-2"]
    assert (await end(played, *several)).status_code == 200
    other = await end(played, *several, reward=0.0)
    assert (other.status_code, other.json()["code"]) == (409, "other_outcome")


async def test_a_part_is_not_ended_alone_by_any_route_and_each_refusal_says_what_to_do(
    played: PlayedHive, small: PlayedHive
) -> None:
    (multi,) = (await claim(played))["multi_model_episodes"]
    alone = await played.end(multi["main"]["episode_uuid"], 1.0)
    assert alone.status_code == 400
    assert "POST /end_multi_model_episodes" in alone.json()["detail"]
    body = {"client_uuid": "c1", "multi_model_episodes": [[*report(multi)[:1], *report(multi)[:1]]]}
    twice = await played.post("/end_multi_model_episodes", body)
    assert "several on one" in twice.json()["detail"]
    foreign = await end(played, multi, client="c2")
    assert foreign.status_code == 404
    assert small.engine.open.keys() == {"small-1-1"}
    assert (await end(played, multi)).status_code == 200


async def test_any_route_that_aborts_one_part_aborts_all(played: PlayedHive, small: PlayedHive) -> None:
    first, second = (await claim(played, count=2))["multi_model_episodes"]
    of_contract = {"client_uuid": "c1", "episode_uuid": first["small"]["episode_uuid"]}
    assert (await small.post("/abort_episode", of_contract)).json() == {"success": True}
    assert set(played.engine.open) == {"main-1-2"}
    own = {"client_uuid": "c1", "episode_uuids": [second["main"]["episode_uuid"]], "infra": True, "detail": "gone"}
    assert (await played.post("/abort_multi_model_episodes", own)).json() == {"success": True}
    assert (await played.post("/abort_multi_model_episodes", own)).json() == {"success": True}
    reasons = {name: state.engine.closed[f"{name}-1-2"].aborted for name, state in (("main", played), ("small", small))}
    assert reasons == {"main": AbortReason.INFRA, "small": AbortReason.MULTI_MODEL}
    why = (await end(played, first)).json()
    assert why["code"] == "unknown_episode"
    assert "its client has aborted it" in why["detail"]


async def test_a_heartbeat_of_a_part_reaches_its_engine_and_says_what_is_over(
    played: PlayedHive, small: PlayedHive
) -> None:
    (multi,) = (await claim(played))["multi_model_episodes"]
    ids = [one["episode_uuid"] for one in multi.values()]
    body = {"client_uuid": "c1", "episode_uuids": [*ids, "none-1-1", "nonsense"]}
    reply = (await played.post("/touch_multi_model_episodes", body)).json()
    assert (reply["touched"], reply["over"]) == (ids, ["none-1-1", "nonsense"])
    assert reply["used"][ids[0]]["calls"] == 0
    await played.until_received(lambda message: isinstance(message, Touch) and message.episodes == ("small-1-1",))
    await end(played, multi)
    assert (await played.post("/touch_multi_model_episodes", body)).json()["touched"] == []


async def test_a_written_answer_confirms_the_whole_claim(played: PlayedHive, small: PlayedHive) -> None:
    await claim(played)
    await played.until_received(lambda message: isinstance(message, Touch) and len(message.confirmed) == 1)
    assert small.engine.open


async def test_a_claim_waits_on_the_server_until_the_last_engine_rolls(played: PlayedHive) -> None:
    await played.start()
    small = played.other("small")
    offline = await claim(played, wait_s=5.0)
    assert (offline["engine_status"], offline["code"]) == ("ENGINE.OFFLINE", "wrong_phase")
    assert offline["fail_cause"].startswith("Engine small: ")
    await small.post("/sync_train_config", {"yaml_as_string": '{"ajet": {"model": {"path": "tiny"}}}'})
    await small.post("/start_engine")
    booting = await claim(played, name="soon")
    assert booting["engine_status"] == "ENGINE.BOOTING"
    waiting = asyncio.create_task(claim(played, name="two", wait_s=PATIENCE_S))
    await asyncio.sleep(0)
    await small.boot()
    await small.phase(Phase.ROLLING)
    assert (await waiting)["success"]


async def test_what_is_wrong_with_a_claim_is_named(played: PlayedHive, small: PlayedHive) -> None:
    for engines, why in (
        (["main"], "engines: List should have at least 2 items"),
        (["main", "main"], "each engine only once"),
        (["main", "none"], "none is not an engine of this hive, which has main, small"),
    ):
        reply = await claim(played, engines=engines)
        assert why in reply["detail"], reply


async def test_full_engines_are_told_by_name(played: PlayedHive, small: PlayedHive) -> None:
    await claim(played, name="all", count=8)
    reply = await claim(played, client="c2", name="more")
    assert reply["success"] is False
    assert reply["multi_model_episodes"] == []
    assert "Engine main: No available episodes to claim. 8 of at most 8 are open" in reply["fail_cause"]
    assert reply["engine_status"] == "ENGINE.ROLLING"


async def test_the_routes_are_the_hives_and_need_a_client_key(bus: Bus) -> None:
    keys = HiveKeys(client="client-key-of-this-hive", admin="admin-key-of-this-hive")
    async with played_hive(bus, engines=ENGINES, keys=keys) as played:
        for what in ("claim", "end", "abort", "touch"):
            assert (await played.post(f"/{what}_multi_model_episodes")).status_code == 401
            assert (await played.post(f"/e/small/{what}_multi_model_episodes")).status_code == 404
        opened = await played.post("/touch_multi_model_episodes", {}, authorization="Bearer client-key-of-this-hive")
        assert opened.status_code == 400
