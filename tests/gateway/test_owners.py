"""An episode belongs to whoever claimed it: its secret, what the views tell others, and fair shares by key."""

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bombus.bus import Bus
from bombus.errors import Code, Refused
from bombus.hive.episodes import without_secret
from bombus.hive.events import BatchReady, StepCompleted
from bombus.hive.inbox import Claim, Touch
from bombus.hive.steps import SealedStep, idle_limit_s
from bombus.machine.hive_keys import HiveKeys, NamedKey
from bombus_gateway.keys import Keys
from tests.gateway.swarm_hive import JOB, PlayedHive, played_hive

KEYS = Keys(b"0123456789abcdef0123456789abcdef")
ADMIN, CLIENT = "an-admin-key-for-tests", "a-client-key-for-tests"
CLAIM: dict[str, Any] = {"episode_type": "train", "discard_episode_timeout": 60.0, "throttle_policy": None}
USER = ({"role": "user", "content": "a prompt of c1 alone"},)


@pytest.fixture
async def rolling(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus) as played:
        await played.start()
        yield played


# ---- the secret of a claim --------------------------------------------------------------------------------------


def test_the_id_of_a_claim_is_the_name_on_the_log_and_a_secret() -> None:
    claimed_id = KEYS.claimed_id("main-1-7")
    assert without_secret(claimed_id) == "main-1-7"
    assert len(claimed_id) == len("main-1-7.") + 22
    assert KEYS.episode_of(claimed_id) == "main-1-7"


def _key_as_secret() -> str:
    """Return an id with the HMAC of a key, made to cover the same bytes as a claim's secret would."""
    signed = base64.urlsafe_b64decode(KEYS.sign("main", 1, "main-1-7", 9).removeprefix("sk-bombus-") + "==")
    return "main-1-7." + base64.urlsafe_b64encode(signed[-16:]).rstrip(b"=").decode()


@pytest.mark.parametrize(
    "other",
    [
        "main-1-7",
        "main-1-7.",
        "",
        ".",
        KEYS.claimed_id("main-1-7") + "A",
        KEYS.claimed_id("main-1-7")[:-1],
        KEYS.claimed_id("main-1-7").replace("main-1-7", "main-1-8"),
        Keys(b"another secret of enough bytes..").claimed_id("main-1-7"),
        _key_as_secret(),
        "h\u00e9.\ud800",
    ],
)
def test_any_other_id_is_refused_without_a_word_on_whether_there_is_such_an_episode(other: str) -> None:
    with pytest.raises(Refused, match="as the claim returned it") as refused:
        KEYS.episode_of(other)
    assert refused.value.code == Code.NOT_YOUR_EPISODE
    assert "main" not in refused.value.why


async def test_who_knows_only_the_names_of_an_episode_and_its_client_can_do_nothing_to_it(rolling: PlayedHive) -> None:
    episode = without_secret((await rolling.claim())["episode_uuid"])
    await rolling.call(episode, USER, "an answer")
    output = {"reward": -1000.0, "is_success": False, "metadata": {}, "log_metrics": {}}
    one = {"client_uuid": "c1", "episode_uuid": episode}
    end = {"episode_uuid": episode, "task_id": "t", "workflow_output": output}
    for path, body in (
        ("/end_episode", {**one, **end}),
        ("/end_episodes", {"client_uuid": "c1", "episodes": [end]}),
        ("/abort_episode", {**one, **end}),
        ("/abort_episodes", {"client_uuid": "c1", "episode_uuids": [episode]}),
        ("/replay_latest_llm_call", {"episode_uuid": episode}),
    ):
        reply = await rolling.post(path, body)
        assert reply.status_code == 404, path
        assert reply.json()["code"] == "not_your_episode", path
    assert (await rolling.post("/can_continue_episode", one)).json() == {"can_continue": False}
    touched = await rolling.post("/touch_episodes", {"client_uuid": "c1", "episode_uuids": [episode]})
    assert touched.json() == {"touched": [], "over": [episode], "used": {}}
    assert list(rolling.engine.open) == [episode]


async def test_one_id_without_its_secret_refuses_a_whole_command(rolling: PlayedHive) -> None:
    mine = (await rolling.claim())["episode_uuid"]
    theirs = without_secret((await rolling.claim(client="c2"))["episode_uuid"])
    reply = await rolling.post("/abort_episodes", {"client_uuid": "c1", "episode_uuids": [mine, theirs]})
    assert reply.status_code == 404
    assert len(rolling.engine.open) == 2


async def test_an_agents_key_does_not_tell_the_secret_of_its_episode(rolling: PlayedHive) -> None:
    claim = await rolling.claim()
    secret = claim["episode_uuid"].partition(".")[2]
    signed = base64.urlsafe_b64decode(claim["openai_api_key"].removeprefix("sk-bombus-") + "===")
    assert base64.urlsafe_b64decode(secret + "==") not in signed


async def test_a_contract_client_does_all_it_did_with_the_id_that_it_got(rolling: PlayedHive) -> None:
    """It sends back its own id and that of the episode, and nothing else that a claim returned."""
    claim = (await rolling.post("/claim_episode", {"client_uuid": "c1", **CLAIM})).json()
    one = {"client_uuid": "c1", "episode_uuid": claim["episode_uuid"]}
    assert (await rolling.post("/can_continue_episode", one)).json() == {"can_continue": True}
    replay = {"episode_uuid": claim["episode_uuid"]}
    await rolling.call(without_secret(claim["episode_uuid"]), USER, "an answer")
    assert (await rolling.post("/replay_latest_llm_call", replay)).json()["input"]["messages"] == list(USER)
    assert (await rolling.end(claim["episode_uuid"], 1.0)).json() == {"success": True}
    again = (await rolling.post("/claim_episode", {"client_uuid": "c1", **CLAIM})).json()
    output: dict[str, object] = {"reward": 0.0, "is_success": None, "metadata": {}, "log_metrics": {}}
    abort = {"client_uuid": "c1", "episode_uuid": again["episode_uuid"], "task_id": "", "workflow_output": output}
    assert (await rolling.post("/abort_episode", abort)).json() == {"success": True}
    assert not rolling.engine.open


async def test_a_touch_with_the_secret_keeps_an_episode_alive(rolling: PlayedHive) -> None:
    claimed_id = (await rolling.claim())["episode_uuid"]
    reply = await rolling.post("/touch_episodes", {"client_uuid": "c1", "episode_uuids": [claimed_id]})
    used = {"calls": 0, "prompt_tokens": 0, "completion_tokens": 0}
    assert reply.json() == {"touched": [claimed_id], "over": [], "used": {claimed_id: used}}
    name = without_secret(claimed_id)
    await rolling.until_received(lambda message: isinstance(message, Touch) and name in message.episodes)


# ---- what others are told ---------------------------------------------------------------------------------------


async def test_no_view_has_an_id_of_an_episode_or_of_another_client(rolling: PlayedHive) -> None:
    ended = (await rolling.claim("first-client"))["episode_uuid"]
    await rolling.end(ended, 1.0, client="first-client")
    running = (await rolling.claim("second-client"))["episode_uuid"]
    await rolling.call(without_secret(running), USER, "an answer")
    told = (without_secret(ended), without_secret(running), "first-client", "second-client", USER[0]["content"])
    for reply in (
        await rolling.post("/get_episode_buffer"),
        await rolling.http.get("/get_current_batch_rollout_pool_information"),
        await rolling.http.get("/get_engine_status"),
        await rolling.post("/replay_latest_llm_call"),
        await rolling.claim("third-client", throttle_policy={"current_task_id": "t"}, episode_type="eval"),
    ):
        text = reply if isinstance(reply, dict) else reply.json()
        assert not any(word in str(text) for word in told), text


async def test_a_client_finds_itself_in_the_pool_by_its_own_id(rolling: PlayedHive) -> None:
    await rolling.end((await rolling.claim("first-client"))["episode_uuid"], 1.0, client="first-client")
    await rolling.claim("second-client")
    path = "/get_current_batch_rollout_pool_information"
    pool = (await rolling.http.get(path, params={"client_uuid": "second-client"})).json()
    assert pool["completed_tasks_client_uuids"] == {"t1": ["client 1"]}
    assert [row["client_uuid"] for row in pool["running_episode_details"].values()] == ["second-client"]


async def test_a_contract_client_is_throttled_by_the_policy_that_it_sends(rolling: PlayedHive) -> None:
    """Its own check counts tasks under its own id, which the views no longer show."""
    policy = {"ratio": 1.0, "expected_batch_size": 1, "expected_num_repeat": 2}

    def task(name: str) -> dict[str, Any]:
        return {"throttle_policy": {**policy, "current_task_id": name}}

    assert (await rolling.claim(**task("a")))["success"]
    throttled = await rolling.claim(**task("b"))
    assert not throttled["success"]
    assert throttled["fail_cause"].startswith("No available episodes to claim.")
    assert (await rolling.claim(**task("a")))["success"], "a task under way goes on"
    assert (await rolling.claim("c2", **task("b")))["success"], "each client has its own share"
    assert (await rolling.claim(episode_type="eval", **task("b")))["success"]


async def test_only_the_admin_key_reads_the_latest_call_of_all(bus: Bus) -> None:
    async with played_hive(bus, keys=HiveKeys(admin=ADMIN, client=CLIENT)) as played:
        played.http.headers["x-api-key"] = ADMIN
        await played.start()
        episode = without_secret((await played.claim())["episode_uuid"])
        await played.call(episode, USER, "an answer")
        assert (await played.post("/replay_latest_llm_call")).json()["input"]["messages"] == list(USER)
        refused = await played.post("/replay_latest_llm_call", **{"x-api-key": CLIENT})
        assert (refused.status_code, refused.json()["code"]) == (404, "no_calls")


# ---- shares of keys ---------------------------------------------------------------------------------------------

ALICE, BOB = "the-key-of-alice-for-tests", "the-key-of-bob-for-tests"
NAMED = HiveKeys(
    admin=ADMIN,
    client=CLIENT,
    clients={"alice": NamedKey(key=ALICE, open_max=2, waiting_max=1), "bob": NamedKey(key=BOB)},
)


@pytest.fixture
async def shared(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus, keys=NAMED) as played:
        played.http.headers["x-api-key"] = ADMIN
        await played.start()
        yield played


async def claim_with(hive: PlayedHive, key: str, client: str, **more: object) -> dict[str, Any]:
    body = {"client_uuid": client, "claim_id": uuid.uuid4().hex, "wait_s": 0.0, **more}
    claim: dict[str, Any] = (await hive.post("/claim_episodes", body, **{"x-api-key": key})).json()
    return claim


async def test_a_key_has_its_cap_whatever_ids_its_clients_choose(shared: PlayedHive) -> None:
    for client in ("a1", "a2"):
        assert (await claim_with(shared, ALICE, client))["success"]
    refused = await claim_with(shared, ALICE, "a3")
    assert refused["fail_cause"].startswith("No available episodes to claim. Key alice has 2 of at most 2 open")
    assert (await claim_with(shared, BOB, "b1"))["success"]
    assert (await claim_with(shared, CLIENT, "c1"))["success"], "a key without a name has no caps"
    assert [episode.owner for episode in shared.engine.open.values()] == ["alice", "alice", "bob", ""]
    too_many = await shared.post(
        "/claim_episodes", {"client_uuid": "a4", "claim_id": "k", "count": 3}, **{"x-api-key": ALICE}
    )
    assert (too_many.status_code, too_many.json()["code"]) == (400, "malformed")


async def test_a_contract_client_reads_of_its_keys_cap_in_words_on_which_it_asks_again(shared: PlayedHive) -> None:
    path = f"/k/{ALICE}/claim_episode"
    for client in ("a1", "a2"):
        shared.http.headers.pop("x-api-key", None)
        assert (await shared.post(path, {"client_uuid": client, **CLAIM})).json()["success"]
    reply = await shared.post(path, {"client_uuid": "a3", **CLAIM})
    assert reply.status_code == 200
    assert "No available episodes to claim." in reply.json()["fail_cause"]


async def test_waiting_claims_of_a_key_have_a_cap(shared: PlayedHive) -> None:
    held = [await claim_with(shared, ALICE, "a1") for _ in range(2)]
    waiting = asyncio.create_task(claim_with(shared, ALICE, "a1", wait_s=20.0))
    await shared.until_received(lambda message: isinstance(message, Claim) and message.wait_s > 0)
    refused = await claim_with(shared, ALICE, "a2", wait_s=20.0)
    assert "Key alice has 1 of at most 1 claims waiting already" in refused["fail_cause"]
    body = {"client_uuid": "a1", "episode_uuids": [held[0]["episodes"][0]["episode_uuid"]]}
    assert (await shared.post("/abort_episodes", body)).status_code == 200
    assert (await waiting)["success"]


async def test_the_fewest_open_episodes_of_a_key_are_served_first(bus: Bus) -> None:
    keys = HiveKeys(clients={"alice": NamedKey(key=ALICE), "bob": NamedKey(key=BOB)})
    job = {"ajet": {**JOB["ajet"], "rollout": {"num_repeat": 2, "max_env_worker": 2}}}
    async with played_hive(bus, keys=keys) as hive:
        hive.http.headers["x-api-key"] = BOB
        await hive.start(job)
        held = [await claim_with(hive, ALICE, client) for client in ("a1", "a2")]
        greedy = asyncio.create_task(claim_with(hive, ALICE, "a3", wait_s=30.0, waited_s=60.0))
        await hive.until_received(lambda message: isinstance(message, Claim) and message.client == "a3")
        modest = asyncio.create_task(claim_with(hive, BOB, "b1", wait_s=30.0))
        await hive.until_received(lambda message: isinstance(message, Claim) and message.client == "b1")
        body = {"client_uuid": "a1", "episode_uuids": [held[0]["episodes"][0]["episode_uuid"]]}
        await hive.post("/abort_episodes", body)
        assert (await modest)["success"]
        assert not greedy.done()
        greedy.cancel()


async def test_the_same_claim_id_under_two_keys_is_two_claims(shared: PlayedHive) -> None:
    body = {"client_uuid": "c", "claim_id": "first", "wait_s": 0.0}
    one = (await shared.post("/claim_episodes", body, **{"x-api-key": ALICE})).json()
    two = (await shared.post("/claim_episodes", body, **{"x-api-key": BOB})).json()
    assert one["episodes"][0]["episode_uuid"] != two["episodes"][0]["episode_uuid"]


# ---- idle limits ------------------------------------------------------------------------------------------------


def step_of(seconds: float) -> SealedStep:
    batch = BatchReady(at_ns=5, engine="main", run=1, step=1, groups=(), config_digest="")
    done = StepCompleted(
        at_ns=5 + int(seconds * 1e9),
        engine="main",
        run=1,
        step=1,
        trainer_epoch=1,
        checkpoint="",
        checkpoint_digest="",
    )
    return SealedStep(batch=batch, done=done)


@pytest.mark.parametrize(("seconds", "limit_s"), [((), 240), ((5,), 240), ((300, 5), 600), ((90_000,), 3600)], ids=str)
def test_by_default_an_episode_outlasts_two_steps(seconds: tuple[float, ...], limit_s: float) -> None:
    assert idle_limit_s([*map(step_of, seconds), SealedStep(batch=step_of(1).batch)]) == limit_s


async def test_a_claim_without_an_idle_limit_gets_one_that_fits_the_steps(rolling: PlayedHive) -> None:
    rolling.engine.steps.append(step_of(400))
    for claim in (
        (await rolling.post("/claim_episodes", {"client_uuid": "c1", "claim_id": "k"})).json(),
        (await rolling.post("/claim_episode", {"client_uuid": "c1"})).json(),
    ):
        assert claim["discard_episode_timeout"] == 800.0
    assert (await rolling.claim())["discard_episode_timeout"] == 60.0, "a client that names one gets that"


async def test_a_key_may_bound_how_long_its_episodes_are_idle(bus: Bus) -> None:
    keys = HiveKeys(clients={"alice": NamedKey(key=ALICE, idle_max_s=30.0)})
    async with played_hive(bus, keys=keys) as hive:
        hive.http.headers["x-api-key"] = ALICE
        await hive.start()
        for wanted in (None, 10.0, 600_000.0):
            claim = await claim_with(hive, ALICE, "a1", discard_episode_timeout=wanted)
            assert claim["discard_episode_timeout"] == min(wanted or 30.0, 30.0)
