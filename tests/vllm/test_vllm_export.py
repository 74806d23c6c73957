"""What `bombus export` writes is served by vLLM's own server, as a model and as an adapter."""

from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from bombus.export.finding import VersionFiles
from bombus.export.writing import write_adapter, write_whole
from bombus.weights.models import build_tiny, load_model, load_tokenizer_files
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.publish.export import VersionTarget, export, export_adapter, export_base
from tests.inference.backends.small_engines import reference_logprobs
from tests.trainer.small_batches import tiny_settings
from tests.vllm.test_vllm_elsewhere import vllm_server

PROMPT = [5, 9, 12, 7, 30]
SAMPLED = 16
RANK = 4
SHARD_BYTES = 500_000  # the tiny model has 1.7 MB


@dataclass
class Trained:
    """A version with an adapter, and the model that it is."""

    folder: Path
    files: VersionFiles
    model: PreTrainedModel


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    folder = root / "model"
    build_tiny(folder)
    settings = tiny_settings(lora_rank=RANK, lora_alpha=2 * RANK)
    executor = Executor(folder, settings, load_tokenizer_files(folder))
    base = export_base(executor, root / "w", 1)
    torch.manual_seed(0)
    for name, parameter in executor.model.parameters.items():
        if name.endswith("lora_B.weight"):
            torch.nn.init.normal_(parameter, std=0.3)
    adapter = export_adapter(executor, VersionTarget(root / "w", 1, 1), base)
    whole = export(executor, VersionTarget(root / "merged", 1, 1))
    files = VersionFiles(adapter, executor.files, Path(base.where), adapter=Path(adapter.where))
    return Trained(folder, files, load_model(Path(whole.where)))


async def complete(url: str, model: str) -> tuple[list[int], list[float]]:
    """Sample greedily from a server. Return the tokens and their logprobs."""
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": SAMPLED, "temperature": 0, "ignore_eos": True,
        "logprobs": 1, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    logprobs = answer.json()["choices"][0]["logprobs"]
    return [int(each.removeprefix("token_id:")) for each in logprobs["tokens"]], logprobs["token_logprobs"]


def worst(model: PreTrainedModel, tokens: list[int], logprobs: list[float]) -> float:
    """Return the largest difference from the logprobs of a plain forward pass."""
    assert len(tokens) == SAMPLED
    expected = reference_logprobs(model, PROMPT, tokens).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    return float((expected - torch.tensor(logprobs)).abs().max())


async def test_a_whole_model_in_several_files_is_served(trained: Trained, tmp_path: Path) -> None:
    written = write_whole(trained.files, tmp_path, lambda done, total: None, bytes_max=SHARD_BYTES)
    assert len(written.digests) > 1
    async with vllm_server(tmp_path) as url:
        tokens, logprobs = await complete(url, str(tmp_path))
    assert worst(trained.model, tokens, logprobs) < 1e-4


async def test_an_adapter_is_served_on_its_base(trained: Trained, tmp_path: Path) -> None:
    write_adapter(trained.files, tmp_path, str(trained.folder))
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"trained={tmp_path}")
    async with vllm_server(trained.folder, *lora) as url:
        tokens, logprobs = await complete(url, "trained")
    assert worst(trained.model, tokens, logprobs) < 1e-4
    assert worst(load_model(trained.folder), tokens, logprobs) > 0.1, "the adapter changes something"
