"""Episodes that agents play become rollout groups: for an outside trainer, for ours, in one pool with pushed ones."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bombus.bus import Bus
from bombus.hive.state import Phase
from tests.gateway.rollout_groups.test_routes import TRAINER, get, group, post
from tests.gateway.swarm_hive import JOB, PlayedHive, played_hive
from tests.patience import PATIENCE_S


@pytest.fixture
async def hive(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus) as played:
        yield played


async def begin(hive: PlayedHive, registered: dict[str, Any], **collection: bool) -> None:
    """Configure such a job, register a trainer, and boot: our trainer loads the model, and a replica serves it."""
    job = {"ajet": JOB["ajet"], "bombus": {"collection": collection}}
    synced = await hive.post("/sync_train_config", {"yaml_as_string": json.dumps(job)})
    assert synced.status_code == 200, synced.text
    await post(hive, "/register", registered)
    assert hive.engine.phase == Phase.BOOTING
    await hive.boot()
    await hive.phase(Phase.ROLLING)


async def play(hive: PlayedHive, task: str, *rewards: float) -> None:
    """Play one episode of a task for each reward."""
    for reward in rewards:
        claim = await hive.claim()
        assert claim["success"], claim
        await hive.call(claim["episode_uuid"], ({"role": "user", "content": "hi"},), "hello")
        assert (await hive.end(claim["episode_uuid"], reward, task)).status_code == 200


async def until_queued(hive: PlayedHive, groups: int) -> None:
    def are_queued(_: object) -> bool:
        return len(hive.engine.trajectories.queue.groups) == groups

    await hive.gateway.follower.wait_for(are_queued, PATIENCE_S)


async def test_an_outside_trainer_takes_batches_that_episodes_have_collected(hive: PlayedHive) -> None:
    await begin(hive, TRAINER, episode_groups=True)
    assert hive.engine.groups_episodes
    assert await get(hive, "/batch") == {"batch": None}
    await play(hive, "t1", 1.0, 0.0)
    await play(hive, "t2", 0.5)
    await play(hive, "t3", 0.0, 1.0)
    await until_queued(hive, 2)
    assert [each.task for each in hive.engine.pool.values()] == ["t2"], "its group is not complete"
    batch = (await get(hive, "/batch"))["batch"]
    assert [each["scores"] for each in batch] == [[1.0, 0.0], [0.0, 1.0]]
    first = batch[0]
    assert (first["tokens"], first["masks"]) == ([[1, 2, 3]] * 2, [[-100, -100, 3]] * 2)
    assert first["inference_logprobs"] == [[1.0, 1.0, -0.5]] * 2
    said = [[each["content"] for each in sequence] for sequence in first["messages"]]
    assert said == [["hi", "hello"]] * 2
    assert first["env_id"] is None
    assert await get(hive, "/batch") == {"batch": None}
    assert (await get(hive, "/status"))["current_step"] == TRAINER["starting_step"] + 1  # type: ignore[operator]


async def test_episodes_and_pushed_groups_fill_one_pool(hive: PlayedHive) -> None:
    await begin(hive, TRAINER, episode_groups=True)
    await play(hive, "t1", 1.0, 0.0)
    await until_queued(hive, 1)
    await post(hive, "/scored_data", group(0.25))
    batch = (await get(hive, "/batch"))["batch"]
    assert [each["scores"] for each in batch] == [[1.0, 0.0], [0.25, 0.25]]


async def test_our_own_trainer_takes_both_from_one_pool(hive: PlayedHive) -> None:
    registered = TRAINER | {"starting_step": 0, "checkpoint_dir": "a"}
    await begin(hive, registered, episode_groups=True, rollout_groups=True)
    await play(hive, "t1", 1.0, 0.0)
    await until_queued(hive, 1)
    await post(hive, "/scored_data", group(0.25))
    await hive.gateway.follower.wait_for(lambda _: hive.engine.batch is not None, PATIENCE_S)
    batch = hive.engine.batch
    assert batch is not None
    assert [each.sequences for each in batch.rollout_groups] == [2, 2]
    assert (await hive.http.get("/batch")).status_code == 400
    await hive.train()
    await hive.gateway.follower.wait_for(lambda _: hive.engine.version == 1, PATIENCE_S)
    claim = await hive.claim()
    assert claim["success"], "the run goes on rolling, and episodes with it"


async def test_episodes_that_cannot_be_a_group_are_dropped(hive: PlayedHive) -> None:
    await begin(hive, TRAINER | {"batch_size": 1}, episode_groups=True)
    await play(hive, "t1", 1.0, 0.0)  # two sequences, and no batch could have them
    await hive.gateway.follower.wait_for(lambda _: not hive.engine.pool and hive.engine.counters.dropped == 2, 30)
    assert not hive.engine.trajectories.queue.groups


async def test_a_job_of_groups_is_begun_by_registering_and_its_open_episodes_end_with_the_run(hive: PlayedHive) -> None:
    await begin(hive, TRAINER, episode_groups=True)
    refused = await hive.post("/start_engine")
    assert not refused.json()["success"]
    claim = await hive.claim()
    await post(hive, "/register", TRAINER)
    assert hive.engine.run == 2
    assert not hive.engine.open
    assert (await hive.end(claim["episode_uuid"], 1.0)).status_code != 200
