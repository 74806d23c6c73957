"""Environments and trainers with keys of their own: none acts for another."""

from collections.abc import AsyncIterator

import pytest

from bombus.bus import Bus
from bombus.host.hive_keys import HiveKeys, NamedKey
from tests.gateway.scored.test_routes import ENVIRONMENT, TRAINER, Json, group
from tests.gateway.swarm_hive import PlayedHive, played_hive

KEYS = {name: f"the-key-of-{name}-0123456789" for name in ("admin", "ann", "eve")}


@pytest.fixture
async def hive(bus: Bus) -> AsyncIterator[PlayedHive]:
    named = {name: NamedKey(key=KEYS[name]) for name in ("ann", "eve")}
    async with played_hive(bus, keys=HiveKeys(admin=KEYS["admin"], clients=named)) as played:
        yield played


async def test_a_key_takes_no_batch_of_anothers_trainer_and_acts_for_no_environment_of_anothers(
    hive: PlayedHive,
) -> None:
    async def told(name: str, path: str, body: object = None, method: str = "POST") -> Json:
        headers = {"x-api-key": KEYS[name]}
        answer: Json = (await hive.http.request(method, path, json=body, headers=headers)).json()
        return answer

    await told("admin", "/register", TRAINER)
    assert await told("admin", "/batch", method="GET") == {"batch": None}
    number = int((await told("ann", "/register-env", ENVIRONMENT))["env_id"])

    for asked in (number, number + 7):  # hers, and one that never was, are answered alike
        why = f"There is no environment {asked}: register it first."
        assert await told("eve", "/disconnect-env", {"env_id": asked}) == {"status": "failure", "error": why}
        status = await told("eve", "/status-env", {"env_id": asked}, "GET")
        assert why in str(status), status
        assert await told("eve", "/scored_data", group(1.0, asked, 1)) == {"status": "received"}
    known = hive.engine.trajectories.queue.environments[number]
    assert (known.connected, known.held_groups) == (True, 0)
    assert await told("ann", "/scored_data", group(1.0, number, 1)) == {"status": "buffered", "buffer_size": 1}
    assert (await told("eve", "/latest_example", method="GET"))["tokens"] == []
    assert (await told("ann", "/latest_example", method="GET"))["tokens"] != []
    for score in (2.0, 3.0):
        await told("ann", "/scored_data", group(score, number, 2))
    refused = await told("eve", "/batch", method="GET")
    assert refused["status"] == "error", refused
    batch = (await told("admin", "/batch", method="GET"))["batch"]
    assert batch is not None, "nobody has taken it"
    assert await told("ann", "/disconnect-env", {"env_id": number}) == {"status": "success"}
