"""The canary in vLLM: healthy versions pass in place, and planted faults end the child.

`BOMBUS_TEST_LONG=1 pytest tests/vllm/test_vllm_canary.py -s` prints how far vLLM is from the trainer with SmolLM2.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from math import sqrt
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from bombus.weights.canary import SERVED, CanaryFailed, canary_sequences, compare
from bombus.weights.deltas import DELTA_FILE
from bombus.weights.models import resolve_model
from bombus_inference.backends.protocol import Policy
from bombus_inference.backends.vllm.backend import VllmBackend
from bombus_inference.settings import VllmSettings
from tests.effort import long_only
from tests.inference.backends.http_backends import BackendClient, ignore_stage
from tests.inference.backends.small_engines import request
from tests.trainer.small_batches import tiny_model_folder
from tests.vllm.test_vllm_backend import ENGINE, LONG
from tests.weights.test_canary import (
    ADAPTER_FAULTS,
    FULL_FAULTS,
    LAST,
    Precision,
    Run,
    edited,
    made_run,
    planted,
)

SMOLLM2_VOCABULARY = 49_152


@asynccontextmanager
async def vllm(precision: Precision) -> AsyncIterator[tuple[VllmBackend, BackendClient]]:
    client = BackendClient()
    settings = ENGINE.model_copy(update={"dtype": precision, "threads": 0})
    backend = VllmBackend(settings, VllmSettings(eager=True), client.deliver)
    try:
        yield backend, client
    finally:
        await backend.stop()


def whole_run(root: Path, rank: int, lr: float, model: Path) -> Run:
    """Return a run whose folders have whole copies alone, as vLLM reads all files of tensors in a folder."""
    run = made_run(root, "bfloat16", rank, lr, model)
    for version in range(LAST + 1):
        (run.folder(version) / DELTA_FILE).unlink(missing_ok=True)
    return run


def faulty(run: Run, fault: str, into: Path) -> Policy:
    """Return the newest version as a vLLM with this fault would compute it.

    One without the adapter computes what one with an adapter of zeros does.
    """
    if fault == "adapter not applied":
        return edited(run.policy(LAST), into, lambda new: {name: torch.zeros_like(each) for name, each in new.items()})
    return planted(run, fault, into)


@pytest.mark.parametrize(
    ("rank", "tied", "fault"),
    [(0, False, "last version's weights"), (0, True, "delta applied twice"), (4, False, "adapter not applied")],
)
async def test_healthy_versions_pass_beside_open_calls_and_a_planted_fault_ends_the_child(
    rank: int, tied: bool, fault: str, tmp_path: Path
) -> None:
    run = whole_run(tmp_path, rank, 1e-3, tiny_model_folder(tmp_path / "model", tied, hidden_size=128))
    async with vllm("float32") as (backend, client):
        assert await backend.load(run.policy(0), ignore_stage) is not None
        tickets = [client.add(backend, request([5, seed], max_tokens=LONG, stream=True)) for seed in range(4)]
        await client.until(lambda: min(map(client.sampled, tickets)) > 0)
        pid = backend.pid
        for version in range(1, LAST + 1):
            check = await backend.load(run.policy(version), ignore_stage)
            assert check is not None
            assert check.difference < 1e-4
        assert backend.pid == pid
        assert [(await client.finished(ticket)).fault for ticket in tickets] == [None] * len(tickets)
        with pytest.raises(CanaryFailed, match="version 3 at the trainer"):
            await backend.load(faulty(run, fault, tmp_path / "fault"), ignore_stage)
        assert (backend.version, backend.pid) == (-1, None)


@long_only
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
async def test_smollm2_passes_and_faults_are_found_in_float32_but_only_gross_ones_in_bfloat16(
    precision: Precision, rank: int, tmp_path: Path
) -> None:
    run = whole_run(tmp_path, rank, 1e-4, resolve_model("smollm2"))
    async with vllm(precision) as (backend, client):
        for version in range(LAST + 1):
            assert await found_by(backend, client, precision, run.policy(version), f"version {version}")
        for fault in ADAPTER_FAULTS if rank else FULL_FAULTS:
            passes = await found_by(backend, client, precision, faulty(run, fault, tmp_path / fault), fault)
            assert not passes or precision == "bfloat16", fault
        for layer in () if rank else (0, 15, 29):
            fault = f"layer {layer} missing"
            policy = edited(run.policy(LAST), tmp_path / fault, partial(without, layer=layer))
            passes = await found_by(backend, client, precision, policy, fault)
            assert not passes or (precision, layer) == ("bfloat16", 15)


def without(tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """Return tensors with which a layer returns its input."""
    last = (f"layers.{layer}.self_attn.o_proj.weight", f"layers.{layer}.mlp.down_proj.weight")
    return {name: torch.zeros_like(value) if name.endswith(last) else value for name, value in tensors.items()}


async def found_by(
    backend: VllmBackend, client: BackendClient, precision: Precision, policy: Policy, what: str
) -> bool:
    """Return whether vLLM with this policy passes, and print how far it is from the trainer. It goes on in any case."""
    await backend.load(replace(policy, expected=None), ignore_stage)
    found: list[float] = []
    for line in canary_sequences(SMOLLM2_VOCABULARY):
        scored = msgspec.structs.replace(request(line, max_tokens=0), prompt_logprobs=True)
        found += (await client.ask(backend, scored)).prompt_logprobs[1:]
    assert policy.expected is not None
    apart = [abs(here - there) for here, there in zip(found, policy.expected.canary.logprobs, strict=True)]
    print(f"{what}: largest {max(apart):.2g}, rms {sqrt(sum(each * each for each in apart) / len(apart)):.2g}")
    try:
        return compare(policy.expected, found, SERVED[precision]) is not None
    except CanaryFailed:
        return False
