"""Environments push rollout groups over HTTP, and our own trainer makes a step of each batch, once (R11, R16)."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bombus.bus import Bus
from bombus.bus.streams import stream_configs
from bombus.config.job import RunConfig
from bombus.faults import Point
from bombus.hive.events import BatchReady
from bombus.hive.state import Phase
from tests.conftest import SMALL_STREAMS
from tests.gateway.openai_hive import gateway_of
from tests.trainer.forked_trainers import Forge
from tests.trainer.trainer_hive import WAIT_S, Stage, served, staged
from tests.trainer.trainer_lives import Life

TRAINER = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 4,
    "max_token_len": 16,
    "checkpoint_dir": "atropos/first",
    "save_checkpoint_interval": 1,
    "starting_step": 0,
    "num_steps": 100,
}
Json = dict[str, Any]


class GroupStage:
    """A hive whose job trains rollout groups, and a client of its gateway."""

    def __init__(self, stage: Stage, http: httpx.AsyncClient) -> None:
        self.stage = stage
        self.http = http

    async def post(self, path: str, body: object, status: int = 200) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def get(self, path: str, status: int = 200) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def version(self, version: int) -> None:
        await self.stage.until(Phase.ROLLING, version)

    async def begin(self, registered: object = TRAINER, **job: object) -> None:
        """Configure the engine, and register the trainer that it has itself."""
        await self.stage.configure(group_job(self.stage, **job))
        await self.post("/register", registered)

    async def push_batch(self, step: int) -> None:
        """Push the two groups of a step: the same in every hive."""
        for number in range(2):
            await self.post("/scored_data", group(step, number))

    async def feed(self) -> None:
        """Push the groups of a step once the one before it is published."""
        while True:
            step = self.stage.engine.version + 1
            if self.stage.engine.step < step and self.stage.engine.phase == Phase.ROLLING:
                await self.push_batch(step)
            await self.stage.follower.wait_for(
                lambda _, step=step: self.stage.engine.phase == Phase.ROLLING and self.stage.engine.version >= step  # type: ignore[misc]
            )


def group_job(stage: Stage, **trainer: object) -> RunConfig:
    job = stage.job(**trainer)  # type: ignore[arg-type]
    return job.model_copy(update={"collection": job.collection.model_copy(update={"rollout_groups": True})})


def group(step: int, number: int = 0) -> Json:
    """Return two sequences of one prompt. The first of them is the better one.

    No two groups are equal, up to step 10: the same bytes within a minute are the same push.
    """
    rows = [[5, 6, 10 + 2 * step + number, 7], [5, 6, 40 + 2 * step + number, 8]]
    return {
        "tokens": rows,
        "masks": [[-100, -100, *row[2:]] for row in rows],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, -4.0, -4.0]] * 2,
    }


@asynccontextmanager
async def group_stage(bus: Bus, folder: Path) -> AsyncIterator[GroupStage]:
    async with (
        staged(bus, folder) as stage,
        gateway_of(bus) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http,
    ):
        yield GroupStage(stage, http)


@pytest.fixture
async def groups_stage(bus: Bus, tmp_path: Path) -> AsyncIterator[GroupStage]:
    async with group_stage(bus, tmp_path) as groups_stage:
        yield groups_stage


def logprob_of(groups_stage: GroupStage, tokens: list[int]) -> float:
    """Return the newest policy's logprob of the third token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(groups_stage.stage.folder / "model", dtype=torch.float32)
    assert groups_stage.stage.engine.weights is not None
    model.load_state_dict(served(groups_stage.stage.engine.weights.weights), strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, 1]
    return float(torch.log_softmax(logits, -1)[tokens[2]])


async def test_r16_pushed_groups_become_the_next_policy_which_prefers_what_has_scored_more(
    groups_stage: GroupStage,
) -> None:
    groups_stage.stage.train()
    await groups_stage.begin()
    await groups_stage.version(0)
    better, worse = group(1)["tokens"]
    before = logprob_of(groups_stage, better), logprob_of(groups_stage, worse)
    for step in (1, 2, 3):
        await groups_stage.post("/scored_data_list", [group(1), group(1) | {"scores": [1.0 + step, 0.0]}])
        await groups_stage.version(step)
    assert logprob_of(groups_stage, better) > before[0]
    assert logprob_of(groups_stage, worse) < before[1]
    assert await groups_stage.get("/status") == {"current_step": 3, "queue_size": 0}
    done = groups_stage.stage.engine.step_done
    assert done is not None
    assert (done.metrics["episodes"], done.metrics["tokens_trained"]) == (4, 8)
    assert Path(done.checkpoint).parent.parts[-3:] == ("run-1", "atropos", "first")


async def test_an_environment_joins_once_the_model_is_served_and_nobody_else_gets_the_batches(
    groups_stage: GroupStage,
) -> None:
    await groups_stage.begin()
    environment = {"max_token_length": 16, "desired_name": "gsm", "weight": 1.0, "group_size": 2}
    assert (await groups_stage.post("/register-env", environment))["status"] == "wait for trainer to start"
    groups_stage.stage.train()
    await groups_stage.version(0)
    assert (await groups_stage.post("/register-env", environment))["env_id"] == 0
    assert "trained by the engine's own trainer" in (await groups_stage.get("/batch", 400))["detail"]


async def test_a_group_that_would_be_trained_otherwise_than_it_was_meant_is_refused_in_the_answer_to_its_push(
    groups_stage: GroupStage,
) -> None:
    groups_stage.stage.train()
    await groups_stage.begin()
    for refused, why in (
        ({"ref_logprobs": [[0.0] * 4] * 2}, "ref_logprobs is not accepted by this run's own trainer"),
        ({"group_overrides": {"lr": 1.0}}, "group_overrides.lr is not known to this run's own trainer"),
        ({"masks": [[1] * 4] * 2}, "masks[0][0] is 1: a mask must be -100"),
    ):
        answer = await groups_stage.post("/scored_data", group(1) | refused, 400)
        assert why in answer["detail"]
    longer = {name: [[5] * 17] * 2 for name in ("tokens", "masks")} | {"scores": [1.0, 0.0]}
    answer = await groups_stage.post("/scored_data_list", [group(1), longer], 400)
    assert answer["detail"].startswith("Group 1 of this push: A sequence has 17 tokens")
    assert not groups_stage.stage.engine.trajectories.queue.groups


async def test_what_came_before_the_trainer_and_cannot_be_trained_is_left_out_of_its_step(
    groups_stage: GroupStage,
) -> None:
    await groups_stage.post("/scored_data_list", [group(1), group(1) | {"ref_logprobs": [[0.0] * 4] * 2}])
    groups_stage.stage.train()
    await groups_stage.begin()
    await groups_stage.version(1)
    done = groups_stage.stage.engine.step_done
    assert done is not None
    assert (done.metrics["groups"], done.metrics["episodes_left_out"]) == (1, 1)


@asynccontextmanager
async def group_life(url: str, name: str, folder: Path, forge: Forge, **trainer: object) -> AsyncIterator[Life]:
    """Run a hive whose trainers are processes. Step k's groups are the same in every hive."""
    async with await Bus.connect(url, name, name="test") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        async with group_stage(bus, folder) as groups_stage:
            await groups_stage.begin(mini_batch_num=2, max_tokens_per_bin=32, **trainer)
            feeding = asyncio.create_task(groups_stage.feed())
            try:
                yield Life(groups_stage.stage, forge, url)
            finally:
                feeding.cancel()
        for config in stream_configs(bus.subjects, SMALL_STREAMS):
            await bus.requests.request(f"$JS.API.STREAM.DELETE.{config['name']}")


DEATHS = (
    Point.TRAINER_BATCH_READ,
    Point.TRAINER_UPDATE_DONE,
    Point.TRAINER_CHECKPOINT_RENAMED,
    Point.TRAINER_STEP_SAID,
    Point.TRAINER_STEP_SEEN,  # its weights are not on the log yet
    Point.TRAINER_WEIGHTS_SAID,
)


async def test_r16_a_killed_trainer_makes_the_step_of_its_batch_again_with_the_same_bytes(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    async with group_life(nats_url, hive, tmp_path / "killed", forge) as life:
        for point in DEATHS:
            await life.dies(point)
        await life.dies(Point.TRAINER_WEIGHTS_PRUNED)
        found = life.digests()
        taken = [event.taken for event in life.stage.events if isinstance(event, BatchReady)]
        assert sorted(number for numbers in taken for number in numbers) == list(range(1, 2 * len(taken) + 1))
    assert len(found) > 3
    assert len(set(found)) == len(found), "each step has changed the weights"
    async with group_life(nats_url, f"{hive}-calm", tmp_path / "calm", forge) as life:
        await life.dies(Point.TRAINER_WEIGHTS_PRUNED, len(found))
        assert life.digests() == found


async def test_r16_steps_since_an_older_checkpoint_are_made_again_from_their_groups(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    async with group_life(nats_url, hive, tmp_path / "lost", forge) as life:
        await life.dies(Point.TRAINER_WEIGHTS_PRUNED, 4)
        done = life.stage.engine.step_done
        assert done is not None
        shutil.rmtree(done.checkpoint)
        await life.dies(Point.TRAINER_STEP_MADE_AGAIN)
        await life.dies(Point.TRAINER_WEIGHTS_PRUNED)
        found = life.digests()
        done = life.stage.engine.step_done
        assert done is not None
        assert (done.metrics["steps_made_again"], done.metrics["made_again_differs"]) == (1, 0)
    assert len(found) == 5
