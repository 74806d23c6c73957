"""LoRA adapters that a trainer exports are replaced in a running vLLM, which loads their base model only once."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from bombus.errors import EngineFault
from bombus.weights.models import load_model
from bombus_inference.backends.protocol import Policy
from bombus_inference.backends.vllm.backend import VllmBackend
from bombus_inference.settings import VllmSettings
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.publish.export import VersionTarget, export, export_adapter, export_base
from tests.inference.backends.http_backends import BackendClient, ignore_stage, until_metric
from tests.inference.backends.small_engines import reference_logprobs, request, worst_difference
from tests.trainer.small_batches import tiny_settings
from tests.vllm.test_vllm_backend import CONTEXT, ENGINE, LONG, family, llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

VERSIONS = 3


@dataclass
class Stage:
    """A backend, a base model, the adapters of all versions, and the models with these merged into them."""

    backend: VllmBackend
    client: BackendClient
    base: Path
    adapters: list[Path]
    models: list[PreTrainedModel]

    def policy(self, version: int, adapter: Path | None = None) -> Policy:
        return Policy(self.base, 1, version, CONTEXT, adapter=adapter or self.adapters[version])

    async def at(self, version: int) -> None:
        """Load this version unless it is being served. Starts a child if there is none."""
        if self.backend.version != version:
            await self.backend.load(self.policy(version), ignore_stage)


def lora_executor(folder: Path, rank: int) -> Executor:
    llama(0).save_pretrained(folder)
    files = {"config.json": (folder / "config.json").read_bytes()}
    return Executor(folder, tiny_settings(lora_rank=rank, lora_alpha=2 * rank), files)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Version 0 adds nothing; each other version differs a lot from the one before."""
    root = tmp_path_factory.mktemp("adapters")
    executor = lora_executor(root / "model", rank=4)
    base = export_base(executor, root / "w", 1)
    adapters, models = [], []
    for version in range(VERSIONS):
        adapters.append(Path(export_adapter(executor, VersionTarget(root / "w", version, 1), base).where))
        models.append(load_model(Path(export(executor, VersionTarget(root / "merged", version, 1)).where)))
        torch.manual_seed(version)
        for name, parameter in executor.model.parameters.items():
            if name.endswith("lora_B.weight"):
                torch.nn.init.normal_(parameter, std=0.3)
    client = BackendClient()
    backend = VllmBackend(ENGINE, VllmSettings(eager=True), client.deliver)
    stage = Stage(backend, client, Path(base.where), adapters, models)
    try:
        await stage.at(0)
        yield stage
    finally:
        await backend.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def stage(running: Stage) -> Stage:
    """Return the backend of all tests, which serves version 0 again."""
    await running.at(0)
    return running


async def test_an_adapter_that_adds_nothing_samples_like_its_base_model(stage: Stage) -> None:
    made = (await stage.client.ask(stage.backend, request([5, 17, 3], max_tokens=30))).only
    assert set(made.versions) == {0}
    assert worst_difference(stage.models[0], [5, 17, 3], made) < 1e-4


@pytest.mark.parametrize("version", range(1, VERSIONS))
async def test_an_adapter_replaces_the_previous_one_while_requests_go_on(
    stage: Stage, version: int, tmp_path: Path
) -> None:
    await stage.at(version - 1)
    before = family(stage.backend)
    prompts = [[5, 9, seed] for seed in range(4)]
    tickets = [
        stage.client.add(stage.backend, request(prompt, seed=seed, stream=seed < 2, max_tokens=LONG))
        for seed, prompt in enumerate(prompts)
    ]
    await until_metric(stage.backend, "running", lambda value: value == len(tickets))
    await stage.client.until(lambda: min(map(stage.client.sampled, tickets[:2])) > 3)
    mine = shutil.copytree(stage.adapters[version], tmp_path / "adapter")
    await stage.backend.load(stage.policy(version, mine), ignore_stage)
    shutil.rmtree(mine)  # as a trainer does with old ones: it is not read again
    after = stage.client.add(stage.backend, request([5, 9, 0], seed=0, max_tokens=40))
    for prompt, ticket in zip(prompts, tickets, strict=True):
        made = (await stage.client.finished(ticket)).only
        assert made.versions == sorted(made.versions)
        assert set(made.versions) == {version - 1, version}
        assert len(made.tokens) == LONG
        rows = [reference_logprobs(model, prompt, made.tokens) for model in stage.models]
        expected = [rows[its][at, token] for at, (its, token) in enumerate(zip(made.versions, made.tokens))]
        assert float((torch.stack(expected) - torch.tensor(made.logprobs)).abs().max()) < 1e-4
    made = (await stage.client.finished(after)).only
    assert set(made.versions) == {version}
    assert worst_difference(stage.models[version], [5, 9, 0], made) < 1e-4
    assert worst_difference(stage.models[version - 1], [5, 9, 0], made) > 0.1
    assert family(stage.backend) == before, "the child and its engine are the same processes"


async def test_an_adapter_that_vllm_cannot_load_ends_the_child_and_nothing_is_served(
    stage: Stage, tmp_path: Path
) -> None:
    newest = stage.adapters[-1]
    shutil.copytree(newest, tmp_path / "odd")
    (tmp_path / "odd" / "adapter_config.json").write_text('{"r": 600, "lora_alpha": 1, "target_modules": []}')
    with pytest.raises(EngineFault, match="in place"):
        await stage.backend.load(Policy(stage.base, 1, VERSIONS, CONTEXT, adapter=tmp_path / "odd"), ignore_stage)
    assert stage.backend.version == -1
    assert (await stage.client.refused(stage.backend, request([5]))).retry


async def test_ranks_beyond_vllms_are_refused_before_a_child_is_started(stage: Stage, tmp_path: Path) -> None:
    executor = lora_executor(tmp_path / "model", rank=513)
    base = export_base(executor, tmp_path / "w", 1)
    adapter = Path(export_adapter(executor, VersionTarget(tmp_path / "w", 0, 1), base).where)
    with pytest.raises(EngineFault, match="rank 512 at most"):
        await stage.backend.load(Policy(Path(base.where), 2, 0, CONTEXT, adapter=adapter), ignore_stage)
    assert stage.backend.pid is None
