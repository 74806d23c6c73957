"""Environments and a trainer of Atropos, request by request, through a real gateway, bus and coordinator."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from bombus.bus import Bus, EmbeddedServer
from bombus.errors import BusUnavailable
from bombus.hive import events as ev
from bombus.hive.state import Phase
from bombus.hive.trajectories.state import REPEAT_S
from bombus.replay import upkeep
from bombus.replay.source import BusSource
from bombus_gateway.rollout_groups.group_log import GroupLog
from tests.conftest import freeze, thaw
from tests.coordinator.test_shell import log_of
from tests.gateway.atropos.groups import random_group
from tests.gateway.swarm_hive import ENGINE, JOB, PlayedHive, played_hive
from tests.patience import PATIENCE_S

TRAINER = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 4,
    "max_token_len": 512,
    "checkpoint_dir": "/tmp/c",
    "save_checkpoint_interval": 5,
    "starting_step": 3,
    "num_steps": 10,
}
ENVIRONMENT = {"max_token_length": 512, "desired_name": "gsm8k", "weight": 1.0, "group_size": 2}
Json = dict[str, Any]


@pytest.fixture
async def hive(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus) as played:
        yield played


async def post(hive: PlayedHive, path: str, body: object, status: int = 200) -> Any:
    answer = await hive.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def get(hive: PlayedHive, path: str, body: object = None) -> Any:
    answer = await hive.http.request("GET", path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def group(score: float = 1.0, environment: int | None = None, sequences: int = 2) -> Json:
    tokens = [[1, 2, 3]] * sequences
    masks = [[-100, 2, 3]] * sequences
    return {"tokens": tokens, "masks": masks, "scores": [score] * sequences, "env_id": environment}


async def started(hive: PlayedHive) -> int:
    """Register a trainer that asks for its first batch, and an environment. Return the environment's number."""
    await post(hive, "/register", TRAINER)
    assert await get(hive, "/batch") == {"batch": None}
    joined = await post(hive, "/register-env", ENVIRONMENT)
    assert joined["status"] == "success"
    return int(joined["env_id"])


async def test_an_environment_and_a_trainer_go_through_a_step(hive: PlayedHive) -> None:
    assert await get(hive, "/info") == {"batch_size": -1, "max_token_len": -1}
    assert (await get(hive, "/batch"))["status"] == "error"
    assert isinstance((await post(hive, "/register", TRAINER))["uuid"], int)
    assert hive.engine.phase == Phase.ROLLING
    assert hive.engine.queues_groups
    assert await post(hive, "/register-env", ENVIRONMENT) == {"status": "wait for trainer to start"}
    assert await get(hive, "/batch") == {"batch": None}
    assert await post(hive, "/register-env", ENVIRONMENT) == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "gsm8k_0",
        "checkpoint_dir": "/tmp/c",
        "starting_step": 3,
        "checkpoint_interval": 5,
        "num_steps": 10,
    }
    assert await post(hive, "/scored_data", group(1.0, 0)) == {"status": "received"}
    status = await get(hive, "/status-env", {"env_id": 0})
    assert (status["current_step"], status["queue_size"], status["env_weight"]) == (3, 1, 1.0)
    assert await get(hive, "/status-env?env_id=0") == status
    assert await post(hive, "/scored_data_list", [group(0.5, 0)]) == {"status": "received", "groups_processed": 1}
    batch = (await get(hive, "/batch"))["batch"]
    assert [each["scores"] for each in batch] == [[1.0, 1.0], [0.5, 0.5]]
    assert await get(hive, "/status") == {"current_step": 4, "queue_size": 0}
    assert await get(hive, "/wandb_info") == {"group": "g", "project": "p"}
    assert await post(hive, "/disconnect-env", {"env_id": 0}) == {"status": "success"}
    assert (await post(hive, "/disconnect-env", {"env_id": 7}))["status"] == "failure"
    assert (await get(hive, "/"))["message"] == "AtroposLib API"


async def test_what_was_posted_comes_back_whatever_it_is(hive: PlayedHive) -> None:
    await post(hive, "/register", TRAINER | {"batch_size": 64})
    sent: list[Json] = []
    for seed in range(200):
        each = random_group(seed)
        if sum(len(one["tokens"]) for one in sent) + len(each["tokens"]) <= 64:
            sent.append(each | {"env_id": None})
    rest = 64 - sum(len(one["tokens"]) for one in sent)
    if rest:
        sent.append(group(sequences=rest))
    packed = gzip.compress(json.dumps(sent).encode())
    answer = await hive.http.post("/scored_data_list", content=packed, headers={"content-encoding": "gzip"})
    assert answer.json() == {"status": "received", "groups_processed": len(sent)}
    batch = (await get(hive, "/batch"))["batch"]
    for given, back in zip(sent, batch, strict=True):
        assert back == {name: given.get(name) for name in back}
        assert len(back) == 14
    assert await get(hive, "/batch") == {"batch": None}
    latest = await get(hive, "/latest_example")
    assert latest == batch[-1]


async def test_r16_a_post_that_is_sent_again_counts_once(hive: PlayedHive) -> None:
    environment = await started(hive)
    for _ in range(3):
        assert await post(hive, "/scored_data", group(1.0, environment)) == {"status": "received"}
    assert (await get(hive, "/status"))["queue_size"] == 1
    assert (await hive.bus.state(hive.bus.subjects.trajectories_stream)).last_seq == 1, "it is stored once"
    for key in ("a", "b"):
        answer = await hive.http.post("/scored_data", json=group(2.0, environment), headers={"x-idempotency-key": key})
        assert answer.status_code == 200
    assert (await get(hive, "/status"))["queue_size"] == 3


async def test_a_key_stands_for_the_same_groups_of_the_same_environment_alone(hive: PlayedHive) -> None:
    environment = await started(hive)
    other = int((await post(hive, "/register-env", ENVIRONMENT))["env_id"])
    key = {"x-idempotency-key": "a"}
    for sent in (group(1.0, environment), group(1.0, other)):
        for _ in range(2):
            assert (await hive.http.post("/scored_data", json=sent, headers=key)).status_code == 200
    assert (await get(hive, "/status"))["queue_size"] == 2
    for path, again in (
        ("/scored_data", group(2.0, environment)),
        ("/scored_data_list", [group(1.0, environment), group(2.0, environment)]),
    ):
        refused = await hive.http.post(path, json=again, headers=key)
        assert refused.status_code == 409
        assert "had other groups" in refused.json()["detail"]
    assert (await get(hive, "/status"))["queue_size"] == 2


async def test_a_post_that_is_sent_again_late_counts_again_however_idle_the_hive_was(hive: PlayedHive) -> None:
    environment = await started(hive)
    await post(hive, "/scored_data", group(1.0, environment))
    pushes = hive.coordinator.core.hive.engine(ENGINE).trajectories.pushes
    for key, push in pushes.items():  # no event has come since, so the gateway's fold is where it was
        pushes[key] = msgspec.structs.replace(push, at_ns=push.at_ns - int((REPEAT_S + 1) * 1e9))
    await post(hive, "/scored_data", group(1.0, environment))
    assert (await get(hive, "/status"))["queue_size"] == 2


async def test_r16_a_batch_whose_client_hangs_up_is_served_again(hive: PlayedHive, bus: Bus) -> None:
    await started(hive)
    await post(hive, "/scored_data_list", [group(1.0), group(0.0)])

    class Cut(Exception):
        pass

    async def cut(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise Cut

    asked = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Any:
        return next(asked, None) or await asyncio.Event().wait()

    scope: Json = {"type": "http", "method": "GET", "path": "/batch", "headers": [(b"host", b"hive.test:10086")]}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("hive.test", 10086)}
    with pytest.raises((Cut, ExceptionGroup)):
        async with asyncio.timeout(PATIENCE_S):
            await hive.app(scope, receive, cut)
    assert len((await get(hive, "/batch"))["batch"]) == 2
    assert await get(hive, "/batch") == {"batch": None}


async def test_groups_that_come_before_the_trainer_wait_for_it(hive: PlayedHive) -> None:
    await post(hive, "/scored_data_list", [group(1.0), group(0.0)])
    await post(hive, "/register", TRAINER)
    assert len((await get(hive, "/batch"))["batch"]) == 2


async def test_what_does_not_fit_is_refused_with_its_place_and_nothing_is_queued(hive: PlayedHive) -> None:
    await started(hive)
    bad = group() | {"scores": [1.0]}
    detail = (await post(hive, "/scored_data_list", [group(), bad], 422))["detail"]
    assert detail[0]["loc"] == ["body", 1, "scores"]
    text = json.dumps(group()).replace("1.0", "NaN", 1)
    answer = await hive.http.post("/scored_data", content=text)
    assert answer.status_code == 422
    large = await post(hive, "/scored_data", group(sequences=5), 400)
    assert "no batch could ever take it" in large["detail"]
    assert (await hive.bus.state(hive.bus.subjects.trajectories_stream)).last_seq == 0, "nothing of it is stored"
    unknown = await hive.http.get("/status-env?env_id=9")
    assert unknown.status_code == 404
    assert (await get(hive, "/status"))["queue_size"] == 0


async def test_a_trainer_that_is_refused_a_batch_reads_an_error_and_no_batch(hive: PlayedHive) -> None:
    refused = await hive.http.get("/batch", headers={"sec-fetch-site": "same-site"})
    assert refused.status_code == 401
    await post(hive, "/register", TRAINER)
    hive.gateway.ready = False
    refused = await hive.http.get("/batch")
    assert refused.status_code == 503
    assert (refused.json()["status"], refused.json()["batch"]) == ("error", None)
    assert "still reading the log" in refused.json()["message"]


async def test_groups_that_are_lost_are_given_up_and_the_next_batch_is_made_of_the_others(
    hive: PlayedHive, bus: Bus
) -> None:
    environment = await started(hive)
    for score in (1.0, 2.0, 3.0):
        await post(hive, "/scored_data", group(score, environment))
    await bus.purge_below(bus.subjects.trajectories_stream, 2, ">")
    batch = (await get(hive, "/batch"))["batch"]
    assert [each["scores"][0] for each in batch] == [2.0, 3.0]
    assert await get(hive, "/status") == {"current_step": 4, "queue_size": 0}
    verified = await upkeep.check(BusSource(bus, "the log"))
    assert (verified.groups, verified.lost) == (2, ())
    log = [ev.decode_event(stored.data) for stored in await log_of(bus)]
    (given_up,) = [event for event in log if isinstance(event, ev.GroupsGivenUp)]
    assert given_up.groups == (1,)
    assert "has no message at 1" in given_up.why


async def test_a_bus_that_is_away_costs_no_group(crashing: tuple[EmbeddedServer, Bus]) -> None:
    server, bus = crashing
    async with played_hive(bus) as hive:
        environment = await started(hive)
        for score in (1.0, 2.0):
            await post(hive, "/scored_data", group(score, environment))
        groups = GroupLog(hive.gateway, ENGINE)
        batch = await groups.take()
        assert batch is not None
        await freeze(server)
        try:
            with pytest.raises(BusUnavailable):
                await groups.give_up_lost(batch)
        finally:
            thaw(server)
        assert len((await get(hive, "/batch"))["batch"]) == 2
        assert hive.engine.trajectories.given_up == 0


async def test_a_trainer_that_says_which_batch_it_has_gets_the_same_one_until_it_has_it(hive: PlayedHive) -> None:
    environment = await started(hive)
    for score in (1.0, 2.0, 3.0, 4.0):
        await post(hive, "/scored_data", group(score, environment))

    async def scores(after: int) -> tuple[str, list[float]]:
        answer = await hive.http.get("/batch", params={"after": after})
        return answer.headers["x-batch-number"], [each["scores"][0] for each in answer.json()["batch"]]

    for _ in range(2):
        assert await scores(after=0) == ("1", [1.0, 2.0])
    for _ in range(2):
        assert await scores(after=1) == ("2", [3.0, 4.0])
    assert await get(hive, "/batch?after=2") == {"batch": None}
    for after in ("7", "-1", "x", "9" * 30):
        refused = await hive.http.get("/batch", params={"after": after})
        assert (refused.status_code, refused.json()["status"]) == (400, "error")


async def test_a_delivered_batch_that_is_asked_for_again_and_lost_says_how_to_go_on(hive: PlayedHive, bus: Bus) -> None:
    environment = await started(hive)
    for score in (1.0, 2.0):
        await post(hive, "/scored_data", group(score, environment))
    assert len((await get(hive, "/batch"))["batch"]) == 2
    await hive.gateway.follower.wait_for(lambda _: is_delivered(hive), PATIENCE_S)
    await bus.purge_below(bus.subjects.trajectories_stream, 2, ">")
    refused = await hive.http.get("/batch?after=0")
    assert refused.status_code == 500
    assert "Ask for the next one with after=1" in refused.json()["message"]
    assert await get(hive, "/batch?after=1") == {"batch": None}


def is_delivered(hive: PlayedHive) -> bool:
    batch = hive.engine.trajectories.batch
    return batch is not None and batch.delivered


async def test_groups_that_are_lost_are_found_when_a_log_is_verified(hive: PlayedHive, bus: Bus) -> None:
    environment = await started(hive)
    for score in (1.0, 2.0, 3.0):
        await post(hive, "/scored_data", group(score, environment))
    await bus.purge_below(bus.subjects.trajectories_stream, 3, ">")
    verified = await upkeep.check(BusSource(bus, "the log"))
    assert verified.groups == 3
    assert [f"the body at {place} of " in lost for place, lost in zip((1, 2), verified.lost, strict=True)] == [True] * 2


async def test_a_last_group_that_is_lost_is_told_in_words_until_the_next_comes(hive: PlayedHive, bus: Bus) -> None:
    await post(hive, "/scored_data", group(1.0))
    await bus.purge_below(bus.subjects.trajectories_stream, 2, ">")
    refused = await hive.http.get("/latest_example")
    assert refused.status_code == 500
    assert "The next push replaces it" in refused.json()["detail"]
    await post(hive, "/scored_data", group(0.5))
    assert (await get(hive, "/latest_example"))["scores"] == [0.5, 0.5]


async def test_an_engine_that_plays_episodes_takes_no_groups(hive: PlayedHive) -> None:
    await post(hive, "/sync_train_config", {"yaml_as_string": json.dumps(JOB)})
    await post(hive, "/start_engine", {})
    answer = await post(hive, "/scored_data", group(), 400)
    assert "plays episodes" in answer["detail"]
    assert (await hive.bus.state(hive.bus.subjects.trajectories_stream)).last_seq == 0, "nothing of it is stored"


async def test_the_routes_of_an_engine_are_below_its_name_too(hive: PlayedHive) -> None:
    await started(hive)
    await post(hive, "/scored_data_list", [group(1.0), group(0.0)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(hive.app), base_url="http://hive.test:10086") as other:
        assert len((await other.get("/e/main/batch")).json()["batch"]) == 2


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site", "referer": "https://evil.example/"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"referer": "http://hive.test:10086/", "sec-fetch-site": "same-origin"},  # a name that strangers may own
    ],
)
async def test_an_image_or_a_link_of_another_site_neither_takes_a_batch_nor_resets(
    hive: PlayedHive, headers: dict[str, str]
) -> None:
    await post(hive, "/register", TRAINER)
    await post(hive, "/scored_data_list", [group(1.0), group(0.0)])
    for path in ("/batch", "/reset_data"):
        refused = await hive.http.get(path, headers=headers)
        assert refused.status_code == 401, path
        assert "may not use this hive" in refused.text
    assert await get(hive, "/status") == {"current_step": 3, "queue_size": 2}


async def test_resetting_forgets_everything(hive: PlayedHive) -> None:
    await started(hive)
    await post(hive, "/scored_data", group())
    answer = await hive.http.get("/reset_data")
    assert (answer.text, answer.headers["content-type"].partition(";")[0]) == ("Reset successful", "text/plain")
    assert await get(hive, "/status") == {"current_step": 0, "queue_size": 0}
    assert hive.engine.phase == Phase.OFFLINE
