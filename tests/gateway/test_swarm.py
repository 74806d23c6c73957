"""The swarm contract, route by route, with the field names and sentences of AgentJet's client."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from bombus.bus import Bus, Reader
from bombus.bus.follow import Follower
from bombus.hive import inbox
from bombus.hive.episodes import without_secret
from bombus.hive.events import AbortReason
from bombus.hive.failures import FailureKind
from bombus.hive.inbox import Claim, Touch
from bombus.hive.state import Phase
from bombus_gateway.context import Gateway
from bombus_gateway.keys import Keys
from bombus_gateway.settings import GatewaySettings
from bombus_gateway.swarm import bodies, views
from tests.gateway.swarm_hive import JOB, PlayedHive, played_hive
from tests.patience import PATIENCE_S

OUTPUT = {"reward": 1.0, "is_success": True, "metadata": {}, "log_metrics": {}}


@pytest.fixture
async def played(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus) as played:
        yield played


@pytest.fixture
async def rolling(played: PlayedHive) -> PlayedHive:
    await played.start()
    return played


# ---- the engine -----------------------------------------------------------------------------------------------


async def test_a_fresh_engine_is_offline(played: PlayedHive) -> None:
    status = (await played.http.get("/get_engine_status")).json()
    assert status["engine_status"] == "ENGINE.OFFLINE"
    assert status["engine_status_detail"]
    assert status["global_step"] == 0


async def test_a_bug_is_answered_with_a_code_so_that_clients_do_not_wait_for_it_to_pass(
    played: PlayedHive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "engine_status", lambda *_: 1 / 0)
    async with played.served() as url, httpx.AsyncClient() as http:
        reply = await http.get(f"{url}/get_engine_status")
    assert reply.status_code == 500
    assert reply.json() == {"detail": "The gateway failed (ZeroDivisionError); see its log.", "code": "internal"}


async def test_starting_without_a_job_is_a_200_without_success(played: PlayedHive) -> None:
    reply = await played.post("/start_engine")
    assert reply.status_code == 200
    assert reply.json()["success"] is False
    assert "sync_train_config" in reply.json()["error"]


async def test_a_started_engine_is_visibly_not_offline_and_its_reply_is_held(played: PlayedHive) -> None:
    await played.post("/sync_train_config", {"yaml_as_string": "ajet: {model: {path: tiny}}"})
    began = asyncio.get_running_loop().time()
    reply = (await played.post("/start_engine")).json()
    assert asyncio.get_running_loop().time() - began >= 0.6
    assert reply["success"] is True
    assert isinstance(reply["pid"], int)
    assert reply["begun"] == "", "there was no checkpoint to begin at"
    status = (await played.http.get("/get_engine_status")).json()
    assert status["engine_status"] == "ENGINE.BOOTING"
    assert (await played.http.get("/get_current_batch_rollout_pool_information")).json()["booting_start_time"] > 0


async def test_a_job_is_refused_while_the_engine_runs(rolling: PlayedHive) -> None:
    reply = await rolling.post("/sync_train_config", {"yaml_as_string": json.dumps(JOB)})
    assert reply.status_code == 400
    assert "ENGINE.ROLLING" in reply.json()["detail"]


async def test_a_job_is_compared_with_the_one_that_runs_and_changes_nothing(rolling: PlayedHive) -> None:
    async def differences(**more: object) -> dict[str, Any]:
        job = {"ajet": JOB["ajet"], "bombus": more}
        reply = await rolling.post("/compare_train_config", {"yaml_as_string": json.dumps(job)})
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()["differences"]
        return found

    before = rolling.gateway.follower.position
    assert await differences() == {}
    assert await differences(model={"path": "smollm2"}, trainer={"lr": 0.5}) == {
        "model.path": {"running": "tiny", "wanted": "smollm2"},
        "trainer.lr": {"running": 1e-6, "wanted": 0.5},
    }
    assert rolling.gateway.follower.position == before


async def test_there_is_nothing_to_compare_a_job_with_while_none_runs(played: PlayedHive) -> None:
    reply = await played.post("/compare_train_config", {"yaml_as_string": json.dumps(JOB)})
    assert (reply.status_code, reply.json()["code"]) == (400, "wrong_phase")


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("ajet: {data: {train_batch_size: 0}}", ["ajet.data.train_batch_size", "0", "at least 1"]),
        ("ajet: [", ["the job, line 1, column 8: expected the node content, but found the end"]),
        ("bombus: {trainer: {lrr: 1}}", ["bombus.trainer.lrr", "trainer.lr"]),
        ("bombus: {trainer: {ulysses_parallel_size: 2}}", ["ulysses_parallel_size 2 is refused", "backend torch"]),
        ("{model_path: tiny, ringattn_parallel_size: 2}", ["ringattn_parallel_size = 2 is refused", "in a ring"]),
        ("{model_path: tiny, enable_lora: true, lora_rank: 0}", ["lora_rank = 0", "at least 1"]),
    ],
)
async def test_a_bad_job_is_refused_with_its_field_value_and_range(
    played: PlayedHive, job: str, words: list[str]
) -> None:
    reply = await played.post("/sync_train_config", {"yaml_as_string": job})
    assert reply.status_code == 400
    assert reply.json()["code"] == "bad_config"
    assert all(word in reply.json()["detail"] for word in words)
    assert (await played.http.get("/get_engine_status")).json()["engine_status"] == "ENGINE.OFFLINE"


async def test_stopping_aborts_open_episodes_and_is_repeatable(rolling: PlayedHive) -> None:
    episode = (await rolling.claim())["episode_uuid"]
    assert (await rolling.post("/stop_engine")).json() == {"success": True, "failure_reason": ""}
    assert (await rolling.http.get("/get_engine_status")).json()["engine_status"] == "ENGINE.OFFLINE"
    assert rolling.engine.closed[without_secret(episode)].aborted == AbortReason.ENGINE_STOPPED
    assert (await rolling.post("/stop_engine")).json()["success"] is True


async def test_a_suspended_run_keeps_its_phase_and_says_why_in_the_detail(rolling: PlayedHive) -> None:
    reason = "the model could not be loaded 9 times: CUDA out of memory"
    broke = inbox.EngineBroke(id="stuck", engine="main", run=rolling.engine.run, reason=reason, may_pass=True)
    await rolling.send(broke)
    await rolling.gateway.follower.wait_for(lambda _: bool(rolling.engine.suspended), PATIENCE_S)
    status = (await rolling.http.get("/get_engine_status")).json()
    assert (status["engine_status"], status["suspended"]) == ("ENGINE.ROLLING", reason)
    assert status["engine_status_detail"] == f"suspended: {reason}"
    refused = await rolling.claim()
    assert refused["fail_cause"] == (
        "No available episodes to claim. The run is suspended until its operator resumes it (`bombus resume` or "
        f"client.resume_engine()): {reason}"
    )
    assert refused["suspended"] == reason
    for _ in range(2):
        assert (await rolling.post("/resume_engine")).json() == {"success": True, "failure_reason": ""}
    await rolling.gateway.follower.wait_for(lambda _: not rolling.engine.suspended, PATIENCE_S)
    assert (await rolling.claim())["success"] is True


async def test_the_folder_of_the_runs_weights_is_reported(played: PlayedHive) -> None:
    await played.post("/sync_train_config", {"yaml_as_string": "ajet: {experiment_dir: /data/run-1}"})
    assert (await played.http.get("/get_server_experiment_dir")).json() == {"server_experiment_dir": None}
    await played.start()
    assert (await played.http.get("/get_server_experiment_dir")).json() == {"server_experiment_dir": "/run-1"}


async def test_an_engine_without_a_run_has_nothing_to_resume(played: PlayedHive) -> None:
    reply = (await played.post("/resume_engine")).json()
    assert (reply["success"], reply["code"]) == (False, "wrong_phase")
    assert "It has no run to resume; start one." in reply["failure_reason"]


async def test_code_that_a_client_sends_is_refused(played: PlayedHive) -> None:
    reply = await played.http.post("/sync_train_code", files={"file": ("code.zip", b"PK")})
    assert (reply.status_code, reply.json()["code"]) == (400, "unsupported")


# ---- claiming -------------------------------------------------------------------------------------------------


async def test_a_claim_has_every_field_of_the_contract(rolling: PlayedHive) -> None:
    policy = {"ratio": 1.5, "expected_batch_size": 2, "expected_num_repeat": 2, "current_task_id": "t9"}
    claim = await rolling.claim(throttle_policy=policy)
    assert claim["success"] is True
    assert claim["client_uuid"] == "c1"
    assert without_secret(claim["episode_uuid"]) in rolling.engine.open
    assert claim["openai_base_url"] == "http://hive.test:10086/v1"
    assert claim["openai_api_key"].startswith("sk-bombus-")
    assert claim["fail_cause"] == ""
    assert claim["discard_at"] > 0
    assert rolling.engine.open[without_secret(claim["episode_uuid"])].task_hint == "t9"


async def test_the_base_url_has_no_engine_since_clients_put_their_own_address_before_its_path(
    rolling: PlayedHive,
) -> None:
    body = {"client_uuid": "c1", "episode_type": "train", "discard_episode_timeout": 60.0}
    claim = (await rolling.post("/e/main/claim_episode", body)).json()
    assert claim["openai_base_url"] == "http://hive.test:10086/v1"


async def test_the_sentences_of_a_failed_claim_are_those_that_clients_match(rolling: PlayedHive) -> None:
    held = [(await rolling.claim())["episode_uuid"] for _ in range(8)]
    full = await rolling.claim()
    assert full["success"] is False
    assert full["episode_uuid"] == full["openai_api_key"] == ""
    assert "No available episodes to claim." in full["fail_cause"]
    for index, episode in enumerate(held[:4]):
        assert (await rolling.end(episode, float(index), task=f"t{index // 2}")).status_code == 200
    assert "Engine is in post-rolling phase" in (await rolling.claim())["fail_cause"]
    for episode in held[4:]:
        await rolling.post(
            "/abort_episode",
            {
                "client_uuid": "c1",
                "episode_uuid": episode,
                "task_id": "",
                "workflow_output": {"reward": 0.0, "metadata": {}},
            },
        )
    await rolling.phase(Phase.WEIGHT_SYNCING)
    assert "Engine is syncing weights" in (await rolling.claim())["fail_cause"]
    await rolling.post("/stop_engine")
    assert "ENGINE.OFFLINE" in (await rolling.claim())["fail_cause"]


async def test_a_claim_waits_on_the_server_until_there_is_room(rolling: PlayedHive) -> None:
    held = [(await rolling.claim())["episode_uuid"] for _ in range(8)]
    body = {"client_uuid": "c2", "claim_id": "k1", "wait_s": 20.0, "discard_episode_timeout": 60.0}
    waiting = asyncio.create_task(rolling.post("/claim_episodes", body))
    await rolling.until_received(lambda message: isinstance(message, Claim) and message.client == "c2")
    await rolling.post("/abort_episodes", {"client_uuid": "c1", "episode_uuids": held[:1]})
    assert (await waiting).json()["success"] is True


async def test_a_claim_that_waits_is_answered_when_its_gateway_is_stopped(rolling: PlayedHive) -> None:
    for _ in range(8):
        await rolling.claim()
    body = {"client_uuid": "c2", "claim_id": "k1", "wait_s": 60.0, "discard_episode_timeout": 60.0}
    async with httpx.AsyncClient(timeout=90) as http:
        async with rolling.served() as url:
            waiting = asyncio.create_task(http.post(f"{url}/claim_episodes", json=body))
            await rolling.until_received(lambda message: isinstance(message, Claim) and message.client == "c2")
            rolling.gateway.ready = False
        reply = await waiting
    assert reply.status_code == 200
    assert reply.json()["code"] == "no_episodes"


async def test_a_claim_may_wait_longer_than_the_bus_may_take_to_answer(bus: Bus) -> None:
    async with played_hive(bus, bus_timeout_s=3.0) as hive:
        await hive.start()
        for _ in range(8):
            await hive.claim()
        body = {"client_uuid": "c2", "claim_id": "k1", "wait_s": 4.5, "discard_episode_timeout": 60.0}
        for _ in range(3):
            reply = await hive.post("/claim_episodes", body)
            if reply.status_code != 503:  # a machine that stood still for the bus' timeout may be asked again
                break
        assert "No available episodes to claim." in reply.json()["fail_cause"]


async def test_an_unknown_episode_type_is_a_400(rolling: PlayedHive) -> None:
    body = {"client_uuid": "c1", "episode_type": "test", "discard_episode_timeout": 60.0}
    reply = await rolling.post("/claim_episode", body)
    assert reply.status_code == 400
    assert "episode_type" in reply.json()["detail"]


@pytest.mark.parametrize("timeout", [0, -1, 1e12, "60"])
async def test_a_timeout_that_makes_no_sense_is_a_400(rolling: PlayedHive, timeout: object) -> None:
    body = {"client_uuid": "c1", "episode_type": "train", "discard_episode_timeout": timeout}
    assert (await rolling.post("/claim_episode", body)).status_code == 400


async def test_a_claim_with_the_same_idempotency_key_gets_the_same_episode(rolling: PlayedHive) -> None:
    body = {"client_uuid": "c1", "episode_type": "train", "discard_episode_timeout": 60.0}
    first, second = [
        (await rolling.post("/claim_episode", body, **{"Idempotency-Key": "once"})).json() for _ in range(2)
    ]
    assert first["episode_uuid"] == second["episode_uuid"]
    assert first["openai_api_key"] == second["openai_api_key"]


async def test_a_group_is_claimed_all_or_none(rolling: PlayedHive) -> None:
    body = {"client_uuid": "c1", "claim_id": "g1", "count": 5, "wait_s": 0.0, "task_id": "t1"}
    group = (await rolling.post("/claim_episodes", body)).json()
    assert len({episode["episode_uuid"] for episode in group["episodes"]}) == 5
    assert len({episode["openai_api_key"] for episode in group["episodes"]}) == 5
    again = (await rolling.post("/claim_episodes", body)).json()
    assert again["episodes"] == group["episodes"]
    more = (await rolling.post("/claim_episodes", {**body, "claim_id": "g2"})).json()
    assert more["success"] is False
    assert more["episodes"] == []
    assert "No available episodes to claim." in more["fail_cause"]


async def test_a_claim_id_whose_episodes_are_over_is_a_409(rolling: PlayedHive) -> None:
    body = {"client_uuid": "c1", "claim_id": "g1", "wait_s": 0.0}
    claimed = (await rolling.post("/claim_episodes", body)).json()["episodes"]
    await rolling.post("/abort_episodes", {"client_uuid": "c1", "episode_uuids": [claimed[0]["episode_uuid"]]})
    reply = await rolling.post("/claim_episodes", body)
    assert reply.status_code == 409
    assert reply.json()["code"] == "other_claim"


async def test_an_answered_claim_is_confirmed(rolling: PlayedHive) -> None:
    await rolling.claim()
    (claim,) = rolling.engine.claims
    await rolling.until_received(lambda message: isinstance(message, Touch) and claim in message.confirmed)


async def test_the_episode_of_a_client_that_hung_up_while_claiming_goes_back(rolling: PlayedHive) -> None:
    body = b'{"client_uuid": "gone", "episode_type": "train", "discard_episode_timeout": 60.0}'
    received = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[object] = []

    async def receive() -> dict[str, object]:
        return next(received, {"type": "http.disconnect"})

    async def send(message: object) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/claim_episode", "headers": [], "query_string": b""}
    await rolling.app({**scope, "server": ("hive.test", 80), "scheme": "http"}, receive, send)
    assert sent == []
    (episode,) = rolling.engine.open
    await rolling.gateway.follower.wait_for(lambda _: not rolling.engine.open, PATIENCE_S)
    assert rolling.engine.closed[episode].aborted == AbortReason.UNCONFIRMED


# ---- ending ---------------------------------------------------------------------------------------------------


async def test_an_end_is_idempotent_and_a_second_outcome_is_a_409(rolling: PlayedHive) -> None:
    episode = (await rolling.claim())["episode_uuid"]
    assert (await rolling.end(episode, 1.0)).json() == {"success": True}
    assert (await rolling.end(episode, 1.0)).json() == {"success": True}
    other = await rolling.end(episode, 0.5)
    assert other.status_code == 409
    assert len(rolling.engine.pool) == 1


async def test_the_same_idempotency_key_does_not_hide_another_outcome(rolling: PlayedHive) -> None:
    episode = (await rolling.claim())["episode_uuid"]
    body = {"client_uuid": "c1", "episode_uuid": episode, "task_id": "t1", "workflow_output": OUTPUT}
    assert (await rolling.post("/end_episode", body, **{"Idempotency-Key": "k"})).status_code == 200
    assert (await rolling.post("/end_episode", body, **{"Idempotency-Key": "k"})).status_code == 200
    other = {**body, "workflow_output": {**OUTPUT, "reward": 0.0}}
    assert (await rolling.post("/end_episode", other, **{"Idempotency-Key": "k"})).status_code == 409


async def test_ending_needs_a_known_claimed_episode_of_ones_own(rolling: PlayedHive) -> None:
    episode = (await rolling.claim())["episode_uuid"]
    assert (await rolling.end(episode, 1.0, client="c2")).status_code == 404
    assert (await rolling.end(rolling.gateway.keys.claimed_id("main-1-999"), 1.0)).status_code == 400
    await rolling.post("/abort_episodes", {"client_uuid": "c1", "episode_uuids": [episode]})
    over = await rolling.end(episode, 1.0)
    assert over.status_code == 400
    assert "not in claimed status" in over.json()["detail"]


async def test_kinds_of_failure_are_counted_and_all_but_budgets_are_refused_beside_a_reward(
    rolling: PlayedHive,
) -> None:
    lost, cut = [(await rolling.claim())["episode_uuid"] for _ in range(2)]
    end = {"episode_uuid": cut, "task_id": "t1", "workflow_output": OUTPUT}
    for kind in ("grader", "client", "nonsense"):
        refused = await rolling.post("/end_episodes", {"client_uuid": "c1", "episodes": [{**end, "failure": kind}]})
        assert refused.status_code == 400
    body = {"client_uuid": "c1", "episodes": [{**end, "failure": "turns"}]}
    assert (await rolling.post("/end_episodes", body)).json() == {"success": True}
    body = {"client_uuid": "c1", "episode_uuids": [lost], "failure": "grader"}
    assert (await rolling.post("/abort_episodes", body)).json() == {"success": True}
    counters = rolling.engine.counters
    assert (counters.ended_by, counters.aborted_by) == ({"turns": 1}, {"grader": 1})


def test_a_body_that_only_json_can_read_may_have_a_kind_of_failure() -> None:
    body = {"client_uuid": "c1", "episode_uuids": ["e1"], "failure": "tool"}
    assert bodies.AbortEpisodes.model_validate(body).failure == FailureKind.TOOL


async def test_an_end_outside_of_rolling_names_the_status(rolling: PlayedHive) -> None:
    for index in range(4):
        assert (
            await rolling.end((await rolling.claim())["episode_uuid"], float(index), task=f"t{index // 2}")
        ).is_success
    await rolling.phase(Phase.WEIGHT_SYNCING)
    reply = await rolling.end(rolling.gateway.keys.claimed_id("main-1-77"), 1.0)
    assert reply.status_code == 400
    assert "WEIGHT_SYNCING" in reply.json()["detail"]


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-Infinity", "1e999", '"1.0"', "null", "[]", "[1.0, NaN]", "{}"])
async def test_a_reward_that_is_not_a_finite_number_is_a_400(rolling: PlayedHive, reward: str) -> None:
    episode = (await rolling.claim())["episode_uuid"]
    body = (
        f'{{"client_uuid": "c1", "episode_uuid": "{episode}", "task_id": "t1", '
        f'"workflow_output": {{"reward": {reward}, "metadata": {{}}}}}}'
    )
    reply = await rolling.http.post("/end_episode", content=body)
    assert reply.status_code == 400
    assert reply.json()["code"] == "bad_reward"
    assert without_secret(episode) in rolling.engine.open


async def test_an_end_may_have_one_reward_for_each_call(rolling: PlayedHive) -> None:
    episode = (await rolling.claim())["episode_uuid"]
    first = await rolling.call(episode, ({"role": "user", "content": "1"},), "2")
    await rolling.call(episode, ({"role": "user", "content": "3"},), "4", parent=first)
    wrong = await rolling.end(episode, [1.0])
    assert wrong.status_code == 400
    assert wrong.json()["code"] == "bad_reward"
    assert (await rolling.end(episode, [1.0, 0.0])).is_success
    assert rolling.engine.pool[without_secret(episode)].call_rewards == (1.0, 0.0)


async def test_a_group_ends_all_or_none(rolling: PlayedHive) -> None:
    body = {"client_uuid": "c1", "claim_id": "g1", "count": 2}
    episodes = [one["episode_uuid"] for one in (await rolling.post("/claim_episodes", body)).json()["episodes"]]

    def ends(*rewards: object) -> dict[str, object]:
        return {
            "client_uuid": "c1",
            "episodes": [
                {"episode_uuid": episode, "task_id": "t1", "workflow_output": {"reward": reward}}
                for episode, reward in zip(episodes, rewards, strict=True)
            ],
        }

    assert (await rolling.post("/end_episodes", ends(1.0, None))).status_code == 400
    assert set(map(without_secret, episodes)) == set(rolling.engine.open)
    assert (await rolling.post("/end_episodes", ends(1.0, 0.0))).is_success
    assert list(rolling.engine.pool) == list(map(without_secret, episodes))


async def test_evaluation_is_counted_by_the_data_set_that_its_report_names(rolling: PlayedHive) -> None:
    episode = (await rolling.claim(episode_type="eval"))["episode_uuid"]

    async def named(data_set: str) -> int:
        outcome = '"workflow_output": {"reward": 1.0}'
        end = f'{{"episode_uuid": "{episode}", "task_id": "t", {outcome}, "data_set": {data_set}}}'
        reply = await rolling.http.post("/end_episodes", content=f'{{"client_uuid": "c1", "episodes": [{end}]}}')
        return reply.status_code

    refused = ["1", "null", '"\\ud800"', json.dumps("x" * 129)]
    assert [await named(data_set) for data_set in refused] == [400] * 4
    assert await named(json.dumps("x" * 128)) == 200
    assert {name: stats.mean for name, stats in rolling.engine.evals[0].data_sets.items()} == {"x" * 128: 1.0}


# ---- reading --------------------------------------------------------------------------------------------------


async def test_only_the_client_of_an_open_episode_can_continue_it(rolling: PlayedHive) -> None:
    episode = (await rolling.claim())["episode_uuid"]

    async def can(client: str, which: str) -> bool:
        reply = await rolling.post("/can_continue_episode", {"client_uuid": client, "episode_uuid": which})
        return bool(reply.json()["can_continue"])

    assert await can("c1", episode)
    assert not await can("c2", episode)
    assert not await can("c1", rolling.gateway.keys.claimed_id("main-0-1"))
    await rolling.end(episode, 1.0)
    assert not await can("c1", episode)


async def test_the_buffer_lists_open_episodes_without_any_key(rolling: PlayedHive) -> None:
    claim = await rolling.claim()
    reply = await rolling.post("/get_episode_buffer")
    (row,) = reply.json()["buffer"]
    assert set(row) == {
        "episode_uuid",
        "episode_status",
        "episode_type",
        "openai_base_url",
        "openai_api_key",
        "client_uuid",
        "zmq_listen_result_addr",
        "latest_activity_timestamp",
        "discard_episode_timeout",
        "llm_call_count",
        "debug_log",
        "optional_task_id",
    }
    assert row["episode_status"] == "claimed"
    assert row["openai_api_key"] == ""
    assert claim["openai_api_key"] not in reply.text


async def test_the_pool_reports_the_progress_of_the_next_batch(rolling: PlayedHive) -> None:
    empty = (await rolling.http.get("/get_current_batch_rollout_pool_information")).json()
    assert empty["running_episode_details"] is None
    done = (await rolling.claim())["episode_uuid"]
    await rolling.end(done, 0.5, task="t1")
    await rolling.claim(client="c2")
    pool = (await rolling.http.get("/get_current_batch_rollout_pool_information")).json()
    assert pool["sample_collection_method"] == "rollout_until_finish_enough_tasks"
    assert (pool["completed_episodes"], pool["completed_episode_target"]) == (1, 4)
    assert (pool["completed_tasks"], pool["completed_task_target"]) == (0, 2)
    assert (pool["completed_non_dummy_tasks"], pool["completed_non_dummy_task_target"]) == (0, 2)
    assert pool["task_expected_num_repeat"] == 2
    assert pool["completed_tasks_details"] == {"t1": ["episode 1"]}
    assert pool["completed_tasks_rewards"] == {"t1": [0.5]}
    assert pool["completed_tasks_client_uuids"] == {"t1": ["client 1"]}
    details = pool["running_episode_details"]["episode 1"]
    assert all(isinstance(value, str) for value in details.values())
    assert details["time_since_last_activity"].endswith("s")
    assert details["client_uuid"] == "client 2"
    assert (pool["engine_status"], pool["global_step"], pool["booting_start_time"]) == ("ENGINE.ROLLING", 0, None)


async def test_the_latest_call_is_replayed_with_the_turns_before_it(rolling: PlayedHive) -> None:
    assert (await rolling.post("/replay_latest_llm_call")).status_code == 404
    episode = (await rolling.claim())["episode_uuid"]
    first = await rolling.call(episode, ({"role": "user", "content": "1+1"},), "2")
    await rolling.call(episode, ({"role": "user", "content": "2+2"},), "4", parent=first)
    replay = (await rolling.post("/replay_latest_llm_call", {"episode_uuid": episode})).json()
    assert [message["content"] for message in replay["input"]["messages"]] == ["1+1", "2", "2+2"]
    assert replay["output"]["choices"][0]["message"]["content"] == "4"


async def test_touched_episodes_stay_alive_and_the_others_are_reported_as_over(rolling: PlayedHive) -> None:
    episode = (await rolling.claim())["episode_uuid"]
    over = rolling.gateway.keys.claimed_id("main-0-5")
    body = {"client_uuid": "c1", "episode_uuids": [episode, over]}
    used = {episode: {"calls": 0, "prompt_tokens": 0, "completion_tokens": 0}}
    touched = (await rolling.post("/touch_episodes", body)).json()
    assert touched == {"touched": [episode], "over": [over], "used": used}
    name = without_secret(episode)
    await rolling.until_received(lambda message: isinstance(message, Touch) and name in message.episodes)


async def test_a_client_that_touches_is_told_of_with_the_others_of_the_same_second(rolling: PlayedHive) -> None:
    body = {"client_uuid": "c1", "claim_id": "k", "touches": True}
    claim = (await rolling.post("/claim_episodes", body)).json()
    assert claim["client_silence_s"] == 15.0
    (episode,) = rolling.engine.open.values()
    assert episode.touches
    for client in ("c1", "c2", "c1"):
        assert (await rolling.post("/touch_client", {"client_uuid": client})).json() == {"success": True}
    await rolling.until_received(lambda message: isinstance(message, Touch) and {*message.clients} == {"c1", "c2"})


async def test_a_gateway_that_does_not_take_the_touches_of_clients_does_not_say_that_it_hears_them(bus: Bus) -> None:
    gateway = Gateway(
        GatewaySettings(hive=bus.subjects.hive), bus, Follower(bus), Keys(b"a secret for tests of 32 bytes!!")
    )
    await gateway.heartbeats.beat()
    gateway.ready = True
    gateway.heartbeats.touch_client("c1")
    await gateway.heartbeats.beat()
    async with Reader(bus, bus.subjects.inbox_stream) as reader:
        (first, *_) = map(inbox.decode_message, [each.data for each in await reader.read()])
    assert isinstance(first, Touch)
    assert first.clients == ("c1",)


async def test_a_touch_says_what_the_calls_of_an_episode_have_used(rolling: PlayedHive) -> None:
    episode = (await rolling.claim())["episode_uuid"]
    first = await rolling.call(episode, ({"role": "user", "content": "2+2"},), "4")
    await rolling.call(episode, ({"role": "user", "content": "and 1"},), "5", parent=first)
    touched = await rolling.post("/touch_episodes", {"client_uuid": "c1", "episode_uuids": [episode]})
    assert touched.json()["used"] == {episode: {"calls": 2, "prompt_tokens": 4, "completion_tokens": 2}}


async def test_a_clients_log_lines_are_accepted_until_there_are_too_many(played: PlayedHive) -> None:
    async def accepted() -> bool:
        reply = await played.post("/push_verbose_log", {"tag": "t", "message": "m" * 10_000})
        return bool(reply.json()["success"])

    assert await accepted()
    async with asyncio.timeout(PATIENCE_S):  # a busy machine may send too few in one second
        while all(await asyncio.gather(*(accepted() for _ in range(150)))):
            pass


async def test_clients_agree_to_train(played: PlayedHive) -> None:
    job = {**JOB, "bombus": {"collection": {"method": "any_client_agree_sync_weight"}}}
    refused = (await played.post("/agree_sync_weight", {"client_uuid": "c1"})).json()
    assert refused["success"] is False
    assert "ENGINE.OFFLINE" in refused["failure_reason"]
    await played.start(job)
    await played.end((await played.claim())["episode_uuid"], 1.0)
    await played.end((await played.claim())["episode_uuid"], 0.0)
    agreed = (await played.post("/agree_sync_weight", {"client_uuid": "c1"})).json()
    assert agreed == {"success": True, "failure_reason": ""}
    await played.phase(Phase.WEIGHT_SYNCING)


# ---- malformed requests --------------------------------------------------------------------------------------

BODIES = ["", "{", "[]", "null", "3", '"x"', '{"client_uuid": 3}', '{"client_uuid": ""}', "\xff", "[" * 5000]


@pytest.mark.parametrize(
    "path",
    [
        "/sync_train_config",
        "/claim_episode",
        "/end_episode",
        "/abort_episode",
        "/can_continue_episode",
        "/agree_sync_weight",
        "/claim_episodes",
        "/end_episodes",
        "/abort_episodes",
        "/touch_episodes",
        "/touch_client",
    ],
)
async def test_nonsense_is_a_400_and_never_a_500(played: PlayedHive, path: str) -> None:
    for body in BODIES:
        reply = await played.http.post(path, content=body.encode("latin-1"))
        assert reply.status_code == 400, (path, body, reply.text)
        assert set(reply.json()) == {"detail", "code"}


async def test_a_huge_body_is_a_413(played: PlayedHive) -> None:
    reply = await played.http.post("/end_episode", content=b" " * (5 << 20))
    assert reply.status_code == 413
    assert reply.json()["code"] == "too_large"


@pytest.mark.parametrize(
    "metadata", ['{"n": 1e400}', '{"n": 99999999999999999999999}', '{"s": "\\ud800"}', '{"s": "x"}']
)
async def test_metadata_that_cannot_be_stored_is_never_a_500(rolling: PlayedHive, metadata: str) -> None:
    episode = (await rolling.claim())["episode_uuid"]
    body = (
        f'{{"client_uuid": "c1", "episode_uuid": "{episode}", "task_id": "t1", '
        f'"workflow_output": {{"reward": 1.0, "metadata": {metadata}}}}}'
    )
    assert (await rolling.http.post("/end_episode", content=body)).status_code in (200, 400)


async def test_contract_routes_ignore_unknown_fields_and_our_own_name_them(rolling: PlayedHive) -> None:
    assert (await rolling.claim(partition_limit=None, something_new=1))["success"] is True
    reply = await rolling.post("/claim_episodes", {"client_uuid": "c1", "claim_id": "k", "something_new": 1})
    assert reply.status_code == 400
    assert reply.json()["code"] == "unknown_field"
    assert "something_new" in reply.json()["detail"]


async def test_a_gateway_that_still_reads_the_log_is_a_503_with_retry_after(played: PlayedHive) -> None:
    played.gateway.ready = False
    reply = await played.http.get("/get_engine_status")
    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    assert reply.json()["code"] == "bus_down"


async def test_the_openapi_page_describes_every_body(played: PlayedHive) -> None:
    paths = (await played.http.get("/openapi.json")).json()["paths"]
    schema = paths["/end_episodes"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "reward" in json.dumps(schema)
    assert "$defs" not in json.dumps(schema)
