"""The vllm backend with a model of two layers: exact tokens, exact spans, and what happens when vLLM dies."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from bombus.errors import EngineFault
from bombus.hive.generation import Generate
from bombus.weights.deltas import FULL_FILE
from bombus.weights.models import load_model
from bombus_inference.backends.protocol import Policy
from bombus_inference.backends.vllm.backend import VllmBackend
from bombus_inference.settings import ComputeSettings, VllmSettings
from tests.inference.backends.http_backends import BackendClient, ignore_stage, until_metric
from tests.inference.backends.small_engines import Completion, reference_logprobs, request, worst_difference
from tests.patience import PATIENCE_S
from tests.small_models import small_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 256
ENGINE = ComputeSettings(kv_cache_bytes=64 << 20, max_model_len=CONTEXT, max_running=8, threads=1)
LONG = CONTEXT - 16


def llama(seed: int, vocabulary: int = 60) -> LlamaForCausalLM:
    """A model whose heads have the smallest size that vLLM supports on a CPU."""
    shape = {"vocab_size": vocabulary, "hidden_size": 128, "intermediate_size": 128}
    return small_llama(seed, **shape, max_position_embeddings=CONTEXT).eval()


@dataclass
class Stage:
    """A backend that serves version 0 of run 1, and the models of versions 0 and 1."""

    backend: VllmBackend
    client: BackendClient
    models: list[PreTrainedModel]
    folders: list[Path]

    def policy(self, version: int, run: int = 1) -> Policy:
        return Policy(self.folders[version % 2], run, version, CONTEXT)

    async def at(self, version: int) -> None:
        """Load this version unless it is being served; odd versions are of model 1. Starts a child if there is none."""
        if self.backend.version != version:
            await self.backend.load(self.policy(version), ignore_stage)

    def worst(self, prompt: list[int], made: Completion) -> float:
        """Return the largest difference between reported logprobs and those of the model of each token's version."""
        rows = [reference_logprobs(model, prompt, made.tokens) for model in self.models]
        expected = [rows[version % 2][at, token] for at, (version, token) in enumerate(zip(made.versions, made.tokens))]
        return float((torch.stack(expected) - torch.tensor(made.logprobs)).abs().max())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folders = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"model{seed}")
        llama(seed).save_pretrained(folder)
        folders.append(folder)
    client = BackendClient()
    backend = VllmBackend(ENGINE, VllmSettings(eager=True), client.deliver)
    stage = Stage(backend, client, [load_model(folder) for folder in folders], folders)
    try:
        await stage.at(0)
        yield stage
    finally:
        await backend.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def stage(running: Stage) -> Stage:
    """Return the backend of all tests, which serves version 0 again; a test that ended it is followed by a start."""
    await running.at(0)
    return running


def family(backend: VllmBackend) -> list[psutil.Process]:
    """Return the processes of the child, its engine and its workers."""
    assert backend.pid is not None
    return psutil.Process(backend.pid).children(recursive=True)


async def test_tokens_come_with_the_logprobs_of_the_distribution_that_they_were_sampled_from(stage: Stage) -> None:
    prompt = [5, 17, 3, 44, 9, 23, 8]
    answer = await stage.client.ask(stage.backend, request(prompt, n=3, max_tokens=20))
    assert sorted(answer.choices) == [0, 1, 2]
    for made in answer.choices.values():
        assert len(made.tokens) == 20
        assert (made.finish, set(made.versions)) == ("length", {0})
        assert worst_difference(stage.models[0], prompt, made) < 1e-4
    assert len({tuple(made.tokens) for made in answer.choices.values()}) == 3
    warm = (await stage.client.ask(stage.backend, request(prompt, temperature=2.0))).only
    expected = torch.log_softmax(_logits(stage.models[0], prompt, warm) / 2.0, dim=-1)
    chosen = expected.gather(1, torch.tensor(warm.tokens)[:, None]).squeeze(1)
    assert float((chosen - torch.tensor(warm.logprobs)).abs().max()) < 1e-4


def _logits(model: PreTrainedModel, prompt: list[int], made: Completion) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *made.tokens]])).logits
    return logits[0][len(prompt) - 1 : -1]


async def test_a_seed_repeats_and_greedy_takes_the_most_likely(stage: Stage) -> None:
    prompt = [5, 17, 3]
    first, second = [(await stage.client.ask(stage.backend, request(prompt, seed=7))).only for _ in range(2)]
    assert first.tokens == second.tokens
    greedy = (await stage.client.ask(stage.backend, request(prompt, temperature=0.0))).only
    assert greedy.tokens == _logits(stage.models[0], prompt, greedy).argmax(dim=-1).tolist()


async def test_alternatives_are_the_most_likely_in_order_whether_the_sampled_one_is_among_them_or_not(
    stage: Stage,
) -> None:
    prompt = [5, 17, 3]
    made = (await stage.client.ask(stage.backend, request(prompt, top_logprobs=3, max_tokens=30))).only
    expected = reference_logprobs(stage.models[0], prompt, made.tokens).topk(3)
    assert [[token for token, _ in row] for row in made.top] == expected.indices.tolist()
    assert any(token not in dict(row) for token, row in zip(made.tokens, made.top))
    cut = (await stage.client.ask(stage.backend, request(prompt, top_k=2, top_logprobs=5))).only
    assert all(len(row) == 2 for row in cut.top), "tokens that cannot be sampled have no logprob"


async def test_a_stop_token_ends_the_answer_and_is_its_last(stage: Stage) -> None:
    whole = (await stage.client.ask(stage.backend, request([5], seed=3))).only
    stop = whole.tokens[4]
    made = (await stage.client.ask(stage.backend, request([5], seed=3, stop=(stop,)))).only
    assert made.finish == "stop"
    assert made.tokens == whole.tokens[: whole.tokens.index(stop) + 1]


async def test_a_stream_begins_before_its_completion_ends(stage: Stage) -> None:
    ticket = stage.client.add(stage.backend, request([5], stream=True, max_tokens=LONG))
    await stage.client.until(lambda: stage.client.sampled(ticket) > 0)
    assert stage.client.sampled(ticket) < LONG
    made = (await stage.client.finished(ticket)).only
    assert len(made.tokens) == LONG
    assert made.frames > 10
    assert worst_difference(stage.models[0], [5], made) < 1e-4


@pytest.mark.parametrize(
    ("generate", "code", "retry"),
    [
        (request([1] * CONTEXT), "prompt_too_long", False),
        (request([60]), "malformed", False),
        (request([1], temperature=-1.0), "malformed", False),
        (request([1], n=9), "malformed", False),
        (request([1], run=2), "wrong_phase", True),
    ],
)
async def test_what_would_crash_vllm_is_refused_before_it_arrives(
    stage: Stage, generate: Generate, code: str, retry: bool
) -> None:
    fault = await stage.client.refused(stage.backend, generate)
    assert (fault.code, fault.retry) == (code, retry)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_request_leaves_the_engine(stage: Stage, stream: bool) -> None:
    ticket = stage.client.add(stage.backend, request([5], stream=stream, max_tokens=LONG))
    await until_metric(stage.backend, "running", lambda value: value == 1)
    decoded = (await stage.backend.metrics())["decode_tokens_total"]
    stage.backend.abort(ticket)
    await until_metric(stage.backend, "running", lambda value: value == 0)
    assert (await stage.backend.metrics())["decode_tokens_total"] < decoded + LONG / 2


async def test_shared_prompts_are_found_in_the_prefix_cache(stage: Stage) -> None:
    prompt = [7] * 200
    await stage.client.ask(stage.backend, request(prompt, max_tokens=1))
    assert (await stage.client.ask(stage.backend, request(prompt, max_tokens=1))).only.cached >= 128
    assert (await stage.backend.metrics())["prefix_hit_ratio"] > 0


async def test_weights_change_in_place_and_each_token_has_the_version_that_sampled_it(stage: Stage) -> None:
    before = family(stage.backend)
    tickets = [
        stage.client.add(stage.backend, request([5, 9, seed], seed=seed, stream=stream, max_tokens=LONG))
        for seed, stream in enumerate([True, True, False, False])
    ]
    # All begin together. Looking at the metrics too would take time, in which they may end on a busy machine.
    await stage.client.until(lambda: min(map(stage.client.sampled, tickets[:2])) > 3)
    await stage.backend.load(stage.policy(1), ignore_stage)
    after = stage.client.add(stage.backend, request([5, 9, 0], seed=0, max_tokens=20))
    for seed, ticket in enumerate(tickets):
        made = (await stage.client.finished(ticket)).only
        assert made.versions == sorted(made.versions)
        assert set(made.versions) == {0, 1}
        assert len(made.tokens) == LONG
        assert stage.worst([5, 9, seed], made) < 1e-4
    made = (await stage.client.finished(after)).only
    assert set(made.versions) == {1}
    assert stage.worst([5, 9, 0], made) < 1e-4, "nothing of the old weights is left in the prefix cache"
    assert family(stage.backend) == before, "the child and its engine are the same processes"


async def test_weights_of_another_shape_are_refused_and_serving_goes_on(stage: Stage, tmp_path: Path) -> None:
    llama(2, vocabulary=64).save_pretrained(tmp_path)
    version = stage.backend.version
    with pytest.raises(EngineFault, match="but the model's is"):
        await stage.backend.load(Policy(tmp_path, 1, version + 1, CONTEXT), ignore_stage)
    assert stage.backend.version == version
    assert (await stage.client.ask(stage.backend, request([5]))).only.versions == [version] * 12


async def test_a_vllm_that_is_killed_ends_its_calls_leaves_nothing_and_starts_again(stage: Stage) -> None:
    version = stage.backend.version
    processes = family(stage.backend)
    assert len(processes) > 1
    ticket = stage.client.add(stage.backend, request([5], stream=True, max_tokens=LONG))
    await stage.client.until(lambda: stage.client.sampled(ticket) > 0)
    processes[0].kill()
    fault = (await stage.client.finished(ticket)).fault
    assert fault is not None
    assert fault.retry
    async with asyncio.timeout(PATIENCE_S):
        await stage.backend.lost.wait()
    assert stage.backend.version == -1
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert (await stage.client.refused(stage.backend, request([5]))).code == "no_replica"
    await stage.at(version)
    assert (await stage.client.ask(stage.backend, request([5]))).only.versions == [version] * 12


async def test_truncated_weights_end_the_child_and_nothing_is_served(stage: Stage, tmp_path: Path) -> None:
    """Half of them may be in place, so no label would be true."""
    processes = family(stage.backend)
    version = stage.backend.version
    llama(0).save_pretrained(tmp_path)
    os.truncate(tmp_path / FULL_FILE, (tmp_path / FULL_FILE).stat().st_size - 4096)
    with pytest.raises(EngineFault, match="in place"):
        await stage.backend.load(Policy(tmp_path, 1, version + 1, CONTEXT), ignore_stage)
    assert stage.backend.version == -1
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert (await stage.client.refused(stage.backend, request([5]))).retry


async def test_a_model_that_vllm_cannot_load_is_reported_with_its_last_words(stage: Stage, tmp_path: Path) -> None:
    llama(0).save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"LlamaForCausalLM"', '"NoSuchModel"'))
    with pytest.raises(EngineFault, match=r"did not start.*NoSuchModel"):
        await stage.backend.load(Policy(tmp_path, 2, 0, CONTEXT), ignore_stage)
