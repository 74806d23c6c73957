"""Environments and trainers with keys of their own: none acts for another."""

from collections.abc import AsyncIterator
from functools import partial

import pytest

from bombus.bus import Bus
from bombus.bus.large.parts import Parts
from bombus.config.streams import StreamLimits
from bombus.errors import LogCorrupted
from bombus.hive.records import BodyRef
from bombus.hive.shares import ADMIN
from bombus.machine.hive_keys import HiveKeys, NamedKey
from bombus_coordinator.releasing import TRAJECTORIES, Releaser
from tests.conftest import MB
from tests.gateway.rollout_groups.test_routes import ENVIRONMENT, TRAINER, Json, group, is_delivered
from tests.gateway.swarm_hive import PlayedHive, played_hive
from tests.patience import PATIENCE_S

KEYS = {name: f"the-key-of-{name}-0123456789" for name in ("admin", "ann", "eve")}


@pytest.fixture
async def hive(bus: Bus) -> AsyncIterator[PlayedHive]:
    await bus.ensure_streams(StreamLimits(trajectories_bytes_max=MB))
    named = {name: NamedKey(key=KEYS[name]) for name in ("ann", "eve")}
    async with played_hive(bus, keys=HiveKeys(admin=KEYS["admin"], clients=named)) as played:
        yield played


async def ask(hive: PlayedHive, name: str, path: str, body: object = None, method: str = "POST") -> Json:
    headers = {"x-api-key": KEYS[name]}
    answer: Json = (await hive.http.request(method, path, json=body, headers=headers)).json()
    return answer


async def test_a_key_whose_groups_fill_their_stream_leaves_others_a_share_and_keeps_nothing_of_theirs(
    hive: PlayedHive, bus: Bus
) -> None:
    told, stream = partial(ask, hive), bus.subjects.trajectories_stream
    parts, fold = Parts(bus, stream), hive.gateway.follower
    releaser = Releaser(bus, lambda: fold.hive, grace_s=0, bodies=TRAJECTORIES)
    await told("admin", "/register", TRAINER)
    answers: list[Json] = []
    while not answers or answers[-1] == {"status": "received"}:
        # Of ann's groups of 3 sequences no batch of 4 can be made, so all of them stay.
        large = group(len(answers), None, 3) | {"tokens": [[70_000] * 5_000] * 3, "masks": [[70_000] * 5_000] * 3}
        answers.append(await told("ann", "/scored_data", large))
    assert "this key would have more than its share. Send them again" in answers[-1]["detail"], answers[-1]
    queue, last = hive.engine.trajectories.queue, (await bus.state(stream)).last_seq
    assert queue.holders["ann"].bytes == queue.bytes > MB // 2
    assert await told("ann", "/scored_data", large) == answers[-1]
    assert (await bus.state(stream)).last_seq == last, "nothing of it is stored"

    batches: list[list[BodyRef]] = []
    for score in (1.0, 2.0):
        for name in ("eve", "admin"):
            assert await told(name, "/scored_data", group(score)) == {"status": "received"}
        assert len((await told("admin", "/batch", method="GET"))["batch"]) == 2
        await fold.wait_for(lambda _: is_delivered(hive), PATIENCE_S)
        batch = hive.engine.trajectories.batch
        assert batch is not None
        assert [each.holder for each in batch.groups] == ["eve", ADMIN]
        batches.append([each.body for each in batch.groups if each.body is not None])
    await releaser.report()
    await fold.wait_for(lambda _: queue.holders["eve"].released > last, PATIENCE_S)
    await releaser.purge(releaser.released())
    for body in batches[0]:
        with pytest.raises(LogCorrupted):
            await parts.fetch(body)
    of_ann = [each.body for each in queue.groups.values() if each.body is not None]
    assert len([await parts.fetch(body) for body in (*of_ann, *batches[1])]) == len(answers) + 1
    assert await told("eve", "/scored_data", group(3.0)) == {"status": "received"}


async def test_a_key_takes_no_batch_of_anothers_trainer_and_acts_for_no_environment_of_anothers(
    hive: PlayedHive,
) -> None:
    told = partial(ask, hive)
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
