"""Adapters of training clients beside each other in one vLLM, and scores of prompts, against merged models."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from bombus.errors import Code, Refused
from bombus.hive.generation import Generate
from bombus.weights.models import load_model
from bombus_inference.backends.protocol import Policy
from bombus_inference.backends.vllm.backend import VllmBackend
from bombus_inference.settings import VllmSettings
from tests.inference.backends.http_backends import BackendClient, ignore_stage
from tests.inference.backends.small_adapters import address_of, loaded, random_adapter, with_merged, write_adapter
from tests.inference.backends.small_engines import (
    Answer,
    Completion,
    engine_for,
    reference_logprobs,
    request,
    worst_difference,
)
from tests.inference.backends.small_engines import answer as torch_answer
from tests.patience import PATIENCE_S
from tests.vllm.test_vllm_backend import CONTEXT, ENGINE, LONG, llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

BASE = ""
SLOTS = 2  # adapters in one batch; there are more than that
RANKS = (1, 4, 7, 8)
SETTINGS = VllmSettings(eager=True, max_loras=SLOTS, max_lora_rank=8)
PROMPT = [number * 7 % 60 for number in range(90)]


@dataclass
class Stage:
    """A backend that serves a base, and models with the adapters of each address merged into it."""

    backend: VllmBackend
    client: BackendClient
    folder: Path
    merged: dict[str, PreTrainedModel]
    folders: dict[str, Path] = field(default_factory=dict)

    @property
    def addresses(self) -> list[str]:
        return [address for address in self.merged if address]

    async def ask(self, body: Generate, address: str = BASE) -> Answer:
        return await self.client.ask(self.backend, msgspec.structs.replace(body, adapter=address))

    async def until_unused(self) -> None:
        """Wait until no request uses an adapter: the last tokens of an answer come before its connection is over."""
        async with asyncio.timeout(PATIENCE_S):
            while any(each.uses for each in await self.backend.adapters()):
                await asyncio.sleep(0)

    async def have_all(self) -> None:
        for address, folder in self.folders.items():
            await self.backend.load_adapter(address, folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    root = tmp_path_factory.mktemp("beside")
    llama(0).save_pretrained(root / "model")
    base = load_model(root / "model")
    client = BackendClient()
    backend = VllmBackend(ENGINE, SETTINGS, client.deliver)
    stage = Stage(backend, client, root / "model", {BASE: base})
    for rank in RANKS:
        targets = ("q_proj", "down_proj") if rank == 7 else ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")
        factors = random_adapter(base, rank, rank, targets)
        address = write_adapter(root / f"rank-{rank}", factors)
        stage.merged[address] = with_merged(base, factors)
        stage.folders[address] = root / f"rank-{rank}"
    try:
        await backend.load(Policy(stage.folder, 1, 0, CONTEXT, beside=True), ignore_stage)
        yield stage
    finally:
        await backend.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def stage(running: Stage) -> Stage:
    """Return the backend of all tests, which has all adapters again."""
    await running.have_all()
    return running


def scored(body: Generate, top: int = 0) -> Generate:
    return msgspec.structs.replace(body, prompt_logprobs=True, top_prompt=top)


def check_scores(model: PreTrainedModel, prompt: list[int], made: Answer) -> None:
    """Compare with the log-softmax of transformers' own forward pass."""
    expected = reference_logprobs(model, prompt[:1], prompt[1:])
    chosen = expected.gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)
    assert math.isnan(made.prompt_logprobs[0])
    assert made.prompt_logprobs[1:] == pytest.approx(chosen.tolist(), abs=1e-4)
    assert made.prompt_version == 0


async def test_more_adapters_than_fit_one_batch_and_the_base_give_what_merged_models_give(stage: Stage) -> None:
    asked = [(address, [5, 9, seed]) for seed in range(3) for address in stage.merged]
    tickets = [
        stage.client.add(
            stage.backend,
            msgspec.structs.replace(request(prompt, seed=at, stream=at % 2 == 0, max_tokens=40), adapter=address),
        )
        for at, (address, prompt) in enumerate(asked)
    ]
    for (address, prompt), ticket in zip(asked, tickets, strict=True):
        made = (await stage.client.finished(ticket)).only
        assert (len(made.tokens), set(made.versions)) == (40, {0})
        assert worst_difference(stage.merged[address], prompt, made) < 1e-4
        others = [model for other, model in stage.merged.items() if other != address]
        assert all(worst_difference(model, prompt, made) > 1e-2 for model in others)
    await stage.until_unused()


@pytest.mark.parametrize("top", [0, 5])
async def test_prompts_are_scored_with_each_adapter_as_its_merged_model_scores_them(stage: Stage, top: int) -> None:
    """All at once, while others generate, and twice: the second time their keys and values are in the cache."""
    asked = [(address, model) for address, model in stage.merged.items()] * 2
    bodies = [scored(request(PROMPT, max_tokens=0, n=2), top) for _ in asked]
    generating = [stage.client.add(stage.backend, request([9], max_tokens=60, seed=seed)) for seed in range(2)]
    answers = await asyncio.gather(*(stage.ask(body, address) for body, (address, _) in zip(bodies, asked)))
    for (_, model), made in zip(asked, answers, strict=True):
        check_scores(model, PROMPT, made)
        assert [(each.tokens, each.finish) for each in made.choices.values()] == [([], "length")] * 2
        expected = reference_logprobs(model, PROMPT[:1], PROMPT[1:]).topk(top, dim=-1)
        assert len(made.prompt_tops) == (len(PROMPT) if top else 0)
        for row, tokens, logprobs in zip(made.prompt_tops[1:], expected.indices.tolist(), expected.values.tolist()):
            assert [token for token, _ in row] == tokens
            assert [logprob for _, logprob in row] == pytest.approx(logprobs, abs=1e-4)
    for ticket in generating:
        assert worst_difference(stage.merged[BASE], [9], (await stage.client.finished(ticket)).only) < 1e-4


@pytest.mark.parametrize("stream", [False, True])
async def test_scores_come_before_the_tokens_of_the_same_answer(stage: Stage, stream: bool) -> None:
    parameters: dict[str, Any] = {"temperature": 0.3, "top_k": 2, "logit_bias": {3: 50.0}}
    made = await stage.ask(scored(request(PROMPT, stream=stream, max_tokens=3, **parameters)))
    check_scores(stage.merged[BASE], PROMPT, made)
    assert (len(made.only.tokens), made.only.cached) == (3, 0)


async def test_a_prompt_of_one_token_has_no_score(stage: Stage) -> None:
    made = await stage.ask(scored(request([7], max_tokens=0), top=2))
    assert [math.isnan(logprob) for logprob in made.prompt_logprobs] == [True]
    assert [token for token, _ in made.prompt_tops[0]] == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_plain_logprobs_are_the_models_own_whatever_is_sampled_from(stage: Stage, stream: bool) -> None:
    parameters: dict[str, Any] = {"temperature": 0.5, "top_k": 4, "presence_penalty": 1.0, "top_logprobs": 2}
    body = msgspec.structs.replace(request(PROMPT, n=2, stream=stream, **parameters), plain_logprobs=True)
    address = stage.addresses[-1]
    answer = await stage.ask(body, address)
    assert sorted(answer.choices) == [0, 1]
    for made in answer.choices.values():
        assert worst_difference(stage.merged[address], PROMPT, made) < 1e-4
        most_likely = reference_logprobs(stage.merged[address], PROMPT, made.tokens).topk(2, dim=-1).indices.tolist()
        assert [[token for token, _ in row] for row in made.top] == most_likely
    drawn = (await stage.ask(request(PROMPT, **parameters), address)).only
    assert worst_difference(stage.merged[address], PROMPT, drawn) > 0.1


async def test_plain_logprobs_need_room_for_one_more_token(stage: Stage) -> None:
    def body(length: int) -> Generate:
        longest = request([1] * length, temperature=0.5, max_tokens=CONTEXT)
        return msgspec.structs.replace(longest, plain_logprobs=True)

    made = (await stage.ask(body(CONTEXT - 3))).only
    assert (len(made.tokens), made.finish) == (2, "length")
    fault = (await stage.ask(body(CONTEXT - 1))).fault
    assert fault is not None
    assert (fault.code, f"takes {CONTEXT - 1} for prompt and completion" in fault.why) == ("prompt_too_long", True)


async def test_vllm_and_our_engine_agree_on_an_adapter(stage: Stage, tmp_path: Path) -> None:
    base = stage.merged[BASE]
    factors = random_adapter(base, 3, rank=3)
    address = write_adapter(tmp_path, factors)
    engine = engine_for(base)
    engine.add_adapter(address, loaded(factors))
    await stage.backend.load_adapter(address, tmp_path)
    body = msgspec.structs.replace(scored(request(PROMPT, max_tokens=0)), adapter=address)
    ours, theirs = torch_answer(engine, body), await stage.ask(body, address)
    assert theirs.prompt_logprobs[1:] == pytest.approx(ours.prompt_logprobs[1:], abs=1e-4)
    await stage.until_unused()
    await stage.backend.unload_adapter(address)


async def test_an_adapter_stays_while_requests_use_it_and_goes_with_its_files(stage: Stage) -> None:
    one = stage.addresses[0]
    ticket = stage.client.add(
        stage.backend, msgspec.structs.replace(request([5], stream=True, max_tokens=LONG), adapter=one)
    )
    await stage.client.until(lambda: stage.client.sampled(ticket) > 0)
    with pytest.raises(Refused, match="1 requests use adapter"):
        await stage.backend.unload_adapter(one)
    stage.backend.abort(ticket)
    await stage.until_unused()
    await stage.backend.unload_adapter(one)
    fault = (await stage.ask(request([5]), one)).fault
    assert fault is not None
    assert (fault.code, fault.retry) == ("unknown_model", False)
    assert await stage.backend.load_adapter(one, stage.folders[one])
    assert not await stage.backend.load_adapter(one, stage.folders[one])
    assert worst_difference(stage.merged[one], [5], (await stage.ask(request([5]), one)).only) < 1e-4


async def test_an_adapter_whose_folder_is_gone_is_served_all_the_same(stage: Stage, tmp_path: Path) -> None:
    """vLLM reads files again after it has dropped an adapter for others, and a trainer removes old checkpoints."""
    factors = random_adapter(stage.merged[BASE], 20, 2)
    address = write_adapter(tmp_path / "gone", factors)
    await stage.backend.load_adapter(address, tmp_path / "gone")
    for file in (tmp_path / "gone").iterdir():
        file.unlink()
    others = [
        write_adapter(tmp_path / str(seed), random_adapter(stage.merged[BASE], seed, 1)) for seed in range(30, 42)
    ]
    for seed, other in enumerate(others, start=30):  # more than it keeps in memory
        await stage.backend.load_adapter(other, tmp_path / str(seed))
        assert (await stage.ask(request([5], max_tokens=1), other)).fault is None
    made: Completion = (await stage.ask(request([5, 6], seed=1), address)).only
    assert worst_difference(with_merged(stage.merged[BASE], factors), [5, 6], made) < 1e-4
    await stage.until_unused()
    for each in (address, *others):
        await stage.backend.unload_adapter(each)


async def test_a_rank_above_the_replicas_is_refused_and_serving_goes_on(stage: Stage, tmp_path: Path) -> None:
    address = write_adapter(tmp_path, random_adapter(stage.merged[BASE], 1, rank=9))
    with pytest.raises(Refused, match=r"has rank 9, .* ranks up to 8.*--vllm-max-lora-rank") as refused:
        await stage.backend.load_adapter(address, tmp_path)
    assert refused.value.code == Code.UNSUPPORTED
    assert len((await stage.ask(request([5]))).only.tokens) == 12


async def test_an_adapter_that_is_not_loaded_is_refused_by_name(stage: Stage) -> None:
    fault = (await stage.ask(request([5]), address_of(1))).fault
    assert fault is not None
    assert fault.code == "unknown_model"
    assert "load it first" in fault.why


async def test_the_base_is_answered_bit_for_bit_as_without_adapters(stage: Stage) -> None:
    bodies = [request(PROMPT[:5], seed=1, max_tokens=30), request([7], temperature=0.0, max_tokens=30)]
    beside = [(await stage.ask(body)).only for body in bodies]
    client = BackendClient()
    backend = VllmBackend(ENGINE, SETTINGS, client.deliver)
    try:
        await backend.load(Policy(stage.folder, 1, 0, CONTEXT), ignore_stage)
        alone = [(await client.ask(backend, body)).only for body in bodies]
        scores = [scored(request(PROMPT, max_tokens=0, seed=seed)) for seed in range(3)]
        for made in await asyncio.gather(*(client.ask(backend, body) for body in scores)):
            check_scores(stage.merged[BASE], PROMPT, made)
        with pytest.raises(Refused, match="no adapters besides its own policy"):
            await backend.load_adapter(stage.addresses[0], stage.folders[stage.addresses[0]])
    finally:
        await backend.stop()
    assert [made.tokens for made in beside] == [made.tokens for made in alone]
    assert [made.logprobs for made in beside] == [made.logprobs for made in alone]
