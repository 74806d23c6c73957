"""An environment samples from a hive, pushes rollout groups, and its reward rises: trainer, replica, gateway and
bus."""

import asyncio
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from bombus.bus import Bus
from bombus.hive.events import StepCompleted
from bombus.hive.subjects import SIGNING_SECRET
from bombus_inference import service
from bombus_inference.settings import ComputeSettings, InferenceSettings
from tests.gateway.openai_hive import gateway_of
from tests.trainer.test_runs_of_groups import TRAINER, GroupStage
from tests.trainer.trainer_hive import WAIT_S, Stage, staged

STEPS = 8
GROUPS, SIZE = 2, 32  # of a step: so many that a mean is within 0.06 of what it stands for, as a rule
PROMPT = [5, 6]
BETTER = 32  # tokens below it score 1: about half of those of a model that has learnt nothing
GENERATE = {"logprobs": 0, "n": SIZE, "max_tokens": 1, "temperature": 1.0}


async def played(scored: GroupStage) -> float:
    """Sample a group in vLLM's form, score it and push it. Return its mean score."""
    answer = await scored.post("/generate", GENERATE | {"prompt": {"prompt_token_ids": PROMPT}})
    sampled: list[tuple[int, float]] = []
    for positions in answer["logprobs"]:
        ((token, logprob),) = positions[0][0].items()
        sampled.append((int(token), logprob))
    scores = [float(token < BETTER) for token, _ in sampled]
    group: dict[str, Any] = {
        "tokens": [[*PROMPT, token] for token, _ in sampled],
        "masks": [[-100, -100, token] for token, _ in sampled],
        "scores": scores,
        "inference_logprobs": [[1.0, 1.0, logprob] for _, logprob in sampled],
        "generation_params": {"temperature": 1.0},
    }
    # A policy that has learnt much answers the same twice: without a key the second group would be a repeat.
    answered = await scored.http.post("/scored_data", json=group, headers={"x-idempotency-key": secrets.token_hex(8)})
    assert answered.status_code == 200, answered.text
    return sum(scores) / SIZE


async def is_served(stage: Stage, version: int) -> None:
    """Wait until a replica serves a version."""
    await stage.follower.wait_for(lambda _: bool(stage.engine.loaded) and stage.engine.version >= version, WAIT_S)


async def test_the_reward_of_an_environment_rises_that_samples_from_the_policy_which_its_groups_train(
    bus: Bus, nats_url: str, hive: str, tmp_path: Path
) -> None:
    compute = ComputeSettings(dtype="float32", kv_cache_bytes=4 << 20, max_model_len=256)
    settings = InferenceSettings(
        hive=hive, bus_url=nats_url, replica="r2", cache=tmp_path / "cache", load_retry_s=0.2, compute=compute
    )
    async with (
        staged(bus, tmp_path, serves=False) as stage,
        gateway_of(bus, secret=await bus.secret(SIGNING_SECRET)) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http,
    ):
        scored = GroupStage(stage, http)
        stage.train()
        replica = asyncio.create_task(service.run(settings))
        await scored.begin(TRAINER | {"batch_size": GROUPS * SIZE, "num_steps": STEPS})
        means: list[float] = []
        for step in range(STEPS):
            await is_served(stage, step)
            means.append(sum([await played(scored) for _ in range(GROUPS)]) / GROUPS)
        await scored.version(STEPS)
        steps = [event.metrics for event in stage.events if isinstance(event, StepCompleted)]
        assert len(steps) == STEPS
        # The first update has the weights that were sampled from, so the trainer's logprobs are the sampler's. A step
        # whose groups are all without a signal has none.
        measured = [metrics["kl_sampler"] for metrics in steps if "kl_sampler" in metrics]
        assert len(measured) > STEPS / 2
        assert max(measured) < 1e-3
        replica.cancel()
        with suppress(asyncio.CancelledError):
            await replica
    assert sum(means[-4:]) / 4 > means[0] + 0.15, means
