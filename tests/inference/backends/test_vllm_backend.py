"""The vllm backend with a double of vLLM's process: changes of weights, failing ones too, and a child that dies.

tests/vllm has the same tests with vLLM itself.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import psutil
import pytest

from bombus.errors import Code, EngineFault, Refused
from bombus.hive.events import Canary, EngineStopped
from bombus.hive.inbox import ReplicaAlive, ReplicaLeaves, StageReached, WeightsLoadedFact
from bombus.hive.records import pack_tokens
from bombus.weights.canary import SCORED, SEQUENCES, CanaryFailed, Expected, canary_sequences
from bombus_inference.backends.protocol import Policy
from bombus_inference.backends.vllm import answering
from bombus_inference.backends.vllm.backend import VllmBackend
from bombus_inference.server import HELP
from bombus_inference.settings import ComputeSettings, VllmSettings
from tests.inference.backends.http_backends import BackendClient, ignore_stage
from tests.inference.backends.small_adapters import address_of, random_adapter, write_adapter
from tests.inference.backends.small_engines import VOCABULARY, llama, request
from tests.inference.test_choice import replica
from tests.inference.test_service import FakeCoordinator, ask, coordinator, ready, started, weights
from tests.patience import PATIENCE_S

__all__ = ["coordinator"]

CONTEXT = 256
COMPUTE = ComputeSettings(max_model_len=CONTEXT, max_running=8)


@dataclass
class Stage:
    backend: VllmBackend
    client: BackendClient
    folder: Path

    def policy(self, version: int, name: str = "good", run: int = 1) -> Policy:
        folder = self.folder / f"{name}-{version}"
        if not folder.exists():
            llama(version).save_pretrained(folder)
        return Policy(folder, run, version, CONTEXT)

    async def serves(self, version: int, run: int = 1) -> bool:
        made = (await self.client.ask(self.backend, request([5], run=run))).only
        return made.tokens == list(range(1, 13)) and made.versions == [version] * 12


@pytest.fixture
def vllm(tmp_path: Path) -> VllmSettings:
    """Settings that start the double in place of vLLM."""
    shim = tmp_path / "python"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("vllm_double.py")} "$@"\n')
    shim.chmod(0o755)
    return VllmSettings(python=shim, start_s=60.0, health_s=0.5)


@pytest.fixture
async def stage(vllm: VllmSettings, tmp_path: Path) -> AsyncIterator[Stage]:
    client = BackendClient()
    stage = Stage(VllmBackend(COMPUTE, vllm, client.deliver), client, tmp_path)
    await stage.backend.load(stage.policy(0), ignore_stage)
    yield stage
    await stage.backend.stop()


async def test_a_vllm_without_a_tokenizer_cannot_hold_answers_to_a_form(stage: Stage) -> None:
    assert not stage.backend.constrains


@pytest.mark.parametrize(("name", "constrains"), [("good", True), ("strange", False)])
async def test_a_tokenizer_that_vllm_cannot_use_is_done_without(
    stage: Stage, name: str, constrains: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Before answers could be held to a form, vLLM needed no tokenizer: such a model is served as it was."""
    policy = stage.policy(0, name, run=2)
    (policy.folder / "tokenizer.json").write_text("{}")
    await stage.backend.load(policy, ignore_stage)
    assert await stage.serves(0, run=2)
    assert stage.backend.constrains is constrains
    assert ("is started without the model's tokenizer" in caplog.text) is not constrains


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_open_during_a_change_of_weights_has_two_spans(stage: Stage, stream: bool) -> None:
    pid = stage.backend.pid
    ticket = stage.client.add(stage.backend, request([7], stream=stream))
    if stream:
        await stage.client.until(lambda: stage.client.sampled(ticket) == 6)
    await stage.backend.load(stage.policy(1), ignore_stage)
    made = (await stage.client.finished(ticket)).only
    assert made.tokens == list(range(1, 13))
    if stream:
        assert made.versions == [0] * 6 + [1] * 6
    assert await stage.serves(1)
    assert stage.backend.pid == pid


async def test_weights_that_compute_something_else_end_the_child_before_a_token_of_theirs_has_left(
    stage: Stage,
) -> None:
    scores = tuple(-float(token) for line in canary_sequences(VOCABULARY) for token in line[1:])
    good, bad = (Canary(logprobs=each, dtype="float32") for each in (scores, tuple(one - 2.0 for one in scores)))
    check = await stage.backend.load(replace(stage.policy(1), expected=Expected(1, good)), ignore_stage)
    assert check is not None
    assert (check.difference, check.way) == (0.0, "as served in float32")
    assert await stage.serves(1)
    ticket = stage.client.add(stage.backend, request([7], stream=True))
    await stage.client.until(lambda: stage.client.sampled(ticket) == 6)
    with pytest.raises(CanaryFailed, match="version 2 at the trainer"):
        await stage.backend.load(replace(stage.policy(2), expected=Expected(2, bad)), ignore_stage)
    ended = await stage.client.finished(ticket)
    assert ended.fault is not None
    assert ended.fault.retry
    assert ended.choices[0].versions == [1] * 6
    assert (stage.backend.version, stage.backend.pid) == (-1, None)
    with pytest.raises(CanaryFailed):
        await stage.backend.load(replace(stage.policy(2), expected=Expected(2, bad)), ignore_stage)
    assert (stage.backend.version, stage.backend.pid) == (-1, None), "a child that has just started is ended too"


@pytest.mark.parametrize(
    ("name", "why"), [("refused", "the prompt is too long"), ("busy", "vLLM is too busy to score the canary within")]
)
async def test_a_child_that_refuses_the_canary_or_is_too_busy_serves_unchecked(
    stage: Stage, name: str, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "CANARY_S", 2.0)
    expected = Expected(1, Canary(logprobs=(-1.0,) * (SEQUENCES * SCORED), dtype="float32"))
    assert await stage.backend.load(replace(stage.policy(1, name), expected=expected), ignore_stage) is None
    assert await stage.serves(1)
    assert "version 1 is served unchecked: " in caplog.text
    assert why in caplog.text


async def test_scores_that_are_not_numbers_where_the_trainers_are_end_the_child(stage: Stage) -> None:
    expected = Expected(1, Canary(logprobs=(-1.0,) * (SEQUENCES * SCORED), dtype="float32"))
    with pytest.raises(EngineFault, match="vLLM did not score the canary of version 1"):
        await stage.backend.load(replace(stage.policy(1, "nan"), expected=expected), ignore_stage)
    assert (stage.backend.version, stage.backend.pid) == (-1, None)


async def test_a_prompt_is_scored_by_one_version_or_the_call_is_tried_elsewhere(stage: Stage) -> None:
    scores = msgspec.structs.replace(request([5, 9, 3], max_tokens=0), prompt_logprobs=True)
    made = await stage.client.ask(stage.backend, scores)
    assert (made.prompt_logprobs[1:], made.prompt_version) == ([-9.0, -3.0], 0)
    crossing = stage.client.add(stage.backend, msgspec.structs.replace(scores, prompt=pack_tokens([7, 9])))
    await stage.backend.load(stage.policy(1), ignore_stage)
    fault = (await stage.client.finished(crossing)).fault
    assert fault is not None
    assert fault.retry
    assert "the weights changed while tokens were scored" in fault.why


async def test_adapters_are_served_in_a_run_of_operations_alone(stage: Stage) -> None:
    with pytest.raises(Refused, match="or vLLM in an operations run") as refused:
        await stage.backend.load_adapter(address_of(1), stage.folder)
    assert refused.value.code == Code.UNSUPPORTED
    asked = msgspec.structs.replace(request([5]), adapter=address_of(1))
    assert (await stage.client.refused(stage.backend, asked)).code == "unsupported"


async def test_a_child_that_died_has_no_adapters_and_the_next_one_loads_them_again(stage: Stage) -> None:
    policy = replace(stage.policy(0, run=2), beside=True)
    await stage.backend.load(policy, ignore_stage)
    factors = random_adapter(llama(0), 1)
    address = write_adapter(stage.folder / "adapter", factors)
    assert await stage.backend.load_adapter(address, stage.folder / "adapter")
    assert [each.address for each in await stage.backend.adapters()] == [address]
    assert stage.backend.pid is not None
    os.kill(stage.backend.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        await stage.backend.lost.wait()
    with pytest.raises(Refused, match="no weights yet"):
        await stage.backend.load_adapter(address, stage.folder / "adapter")
    await stage.backend.load(policy, ignore_stage)
    asked = msgspec.structs.replace(request([5], run=2), adapter=address)
    assert (await stage.client.refused(stage.backend, asked)).code == "unknown_model"
    assert await stage.backend.load_adapter(address, stage.folder / "adapter")
    assert len((await stage.client.ask(stage.backend, asked)).only.tokens) == 12


async def test_weights_that_change_under_adapters_start_a_child_without_them(stage: Stage) -> None:
    """An adapter stays on the model that the run began with, which is gone then."""
    await stage.backend.load(replace(stage.policy(0, run=2), beside=True), ignore_stage)
    pid = stage.backend.pid
    await stage.backend.load(replace(stage.policy(1, run=2), beside=True), ignore_stage)
    assert await stage.serves(1, run=2)
    assert stage.backend.pid != pid
    with pytest.raises(Refused, match="no adapters beside"):
        await stage.backend.load_adapter(address_of(1), stage.folder)


async def test_a_model_on_which_vllm_serves_no_adapters_is_served_without_them(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    await stage.backend.load(replace(stage.policy(0, "plain", run=2), beside=True), ignore_stage)
    assert await stage.serves(0, run=2)
    assert "is started without adapters besides the policy" in caplog.text


async def test_weights_that_fail_to_load_end_the_child_and_the_next_ones_start_another(stage: Stage) -> None:
    pid = stage.backend.pid
    with pytest.raises(EngineFault, match=r"could not change to version 1 in place.*the file breaks off"):
        await stage.backend.load(stage.policy(1, "broken"), ignore_stage)
    assert (stage.backend.version, stage.backend.pid) == (-1, None)
    assert (await stage.client.refused(stage.backend, request([5]))).retry
    await stage.backend.load(stage.policy(2), ignore_stage)
    assert await stage.serves(2)
    assert stage.backend.pid != pid


async def test_a_server_that_lives_on_without_its_engine_is_ended(stage: Stage) -> None:
    await stage.backend.load(stage.policy(1, "sick"), ignore_stage)
    async with asyncio.timeout(PATIENCE_S):
        await stage.backend.lost.wait()
    assert (stage.backend.version, stage.backend.pid) == (-1, None)


async def test_a_call_that_is_open_when_the_child_is_ended_may_be_tried_elsewhere(stage: Stage) -> None:
    ticket = stage.client.add(stage.backend, request([7], stream=True))
    await stage.client.until(lambda: stage.client.sampled(ticket) > 0)
    with pytest.raises(EngineFault):
        await stage.backend.load(stage.policy(1, "broken"), ignore_stage)
    fault = (await stage.client.finished(ticket)).fault
    assert fault is not None
    assert fault.retry


async def test_a_run_gets_a_child_of_its_own_and_unloading_ends_it(stage: Stage) -> None:
    pid = stage.backend.pid
    await stage.backend.load(stage.policy(0, run=2), ignore_stage)
    assert stage.backend.pid != pid
    assert await stage.serves(0, run=2)
    assert (await stage.client.refused(stage.backend, request([5], run=1))).code == "wrong_phase"
    await stage.backend.unload()
    assert stage.backend.pid is None
    assert (await stage.client.refused(stage.backend, request([5], run=2))).code == "no_replica"


async def test_a_child_that_does_not_start_is_an_engine_fault(stage: Stage) -> None:
    with pytest.raises(EngineFault, match="vLLM did not start; its last output: RuntimeError: no such model"):
        await stage.backend.load(stage.policy(0, "dead", run=2), ignore_stage)
    assert stage.backend.pid is None


@pytest.mark.parametrize(
    ("lacks", "what"),
    [
        ("ids", "Expected `array`, got `null` - at `$.choices[0].token_ids`"),
        ("logprobs", "the logprobs do not belong to the tokens"),
        ("versions", "the engine does not say which weights sampled the tokens"),
        ("routes", '/update_weight_version answered 404: {"detail":"Not Found"}'),
    ],
)
async def test_a_vllm_that_lacks_what_a_trainer_needs_is_refused_and_ended(stage: Stage, lacks: str, what: str) -> None:
    with pytest.raises(EngineFault) as caught:
        await stage.backend.load(stage.policy(0, f"without_{lacks}", run=2), ignore_stage)
    assert str(caught.value) == (
        "this vLLM does not return what a trainer needs: the ids, logprobs and weight versions of the tokens "
        f"that it samples ({what}; its last output: nothing): run `bombus install vllm` for one that does"
    )
    assert (stage.backend.version, stage.backend.pid) == (-1, None)
    assert (await stage.client.refused(stage.backend, request([5], run=2))).code == "no_replica"
    await stage.backend.load(stage.policy(0, run=3), ignore_stage)
    assert await stage.serves(0, run=3)


async def test_its_metrics_are_reported(stage: Stage) -> None:
    ticket = stage.client.add(stage.backend, request([7], stream=True))
    await stage.client.until(lambda: stage.client.sampled(ticket) > 0)
    metrics = await stage.backend.metrics()
    assert (metrics["running"], metrics["engine_starts_total"], metrics["swaps_total"]) == (1.0, 1.0, 0.0)
    assert metrics.keys() <= HELP.keys(), "each is documented"


async def test_a_replica_whose_vllm_is_killed_leaves_and_comes_back_with_the_newest_weights(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path, vllm: VllmSettings
) -> None:
    await coordinator.write(started(1), ready(1, 0, weights(tmp_path / "v0", llama())))
    async with replica(hive=hive, bus_url=nats_url, backend="vllm", vllm=vllm):
        await coordinator.receive(WeightsLoadedFact)
        await coordinator.write(ready(1, 1, weights(tmp_path / "v1", llama(1))))
        first = await coordinator.receive(WeightsLoadedFact)
        assert first.version == 1
        (keeper,) = (one for one in psutil.Process().children() if "vllm/keeper.py" in " ".join(one.cmdline()))
        os.kill(keeper.children()[0].pid, signal.SIGKILL)
        assert (await coordinator.receive(ReplicaLeaves)).replica == "r1"
        again = await coordinator.receive(WeightsLoadedFact)
        assert (again.version, again.id != first.id) == (1, True)
        alive = await coordinator.receive(ReplicaAlive, lambda message: message.version == 1)
        assert (await ask(coordinator.bus, alive.url, 1, [5])).only.versions == [1] * 12


async def test_a_replica_whose_change_of_weights_fails_leaves_until_it_has_the_newest(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path, vllm: VllmSettings
) -> None:
    await coordinator.write(started(1), ready(1, 0, weights(tmp_path / "v0", llama())))
    async with replica(hive=hive, bus_url=nats_url, backend="vllm", vllm=vllm):
        await coordinator.receive(WeightsLoadedFact)
        await coordinator.write(ready(1, 1, weights(tmp_path / "broken", llama(1))))
        await coordinator.receive(ReplicaLeaves)
        assert (await coordinator.receive(WeightsLoadedFact)).version == 1, "a new child starts with them"


def keepers_of_vllm() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "vllm/keeper.py" in " ".join(one.cmdline())]


async def test_a_run_that_ends_while_vllm_starts_ends_the_start(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path
) -> None:
    deaf = tmp_path / "python"
    deaf.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import signal; signal.pause()'\n")
    deaf.chmod(0o755)
    await coordinator.write(started(1), ready(1, 0, weights(tmp_path / "v0", llama())))
    async with replica(hive=hive, bus_url=nats_url, backend="vllm", vllm=VllmSettings(python=deaf)):
        assert (await coordinator.receive(StageReached)).stage == "starting vLLM"
        async with asyncio.timeout(PATIENCE_S):
            while not (keepers := keepers_of_vllm()):
                await asyncio.sleep(0.01)  # the stage is told before the child has become its program
        await coordinator.write(EngineStopped(engine="main", run=1))
        _, left = await asyncio.to_thread(psutil.wait_procs, keepers, 30)
        assert left == []
