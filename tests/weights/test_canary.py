"""The canary of a version: planted faults are found before anything is computed with it, and healthy swaps pass."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bombus.architectures.canary import canary_logprobs, sum_of_bits
from bombus.hive.events import Canary, Weights, WeightsReady
from bombus.weights.adapters import ADAPTER_FILE
from bombus.weights.canary import (
    ELSEWHERE,
    IN_FLOAT64,
    SCORED,
    SEQUENCES,
    SERVED,
    TOKENS,
    CanaryFailed,
    Expected,
    canary_sequences,
    compare,
)
from bombus.weights.deltas import DELTA_FILE, DELTA_FORMAT, FULL_FILE
from bombus.weights.models import load_model, resolve_model
from bombus_inference.backends.protocol import Delivery, Policy
from bombus_inference.backends.torch.backend import TorchBackend
from bombus_inference.backends.torch.cache import Blocks
from bombus_inference.settings import ComputeSettings
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.publish.export import ModelPart, VersionTarget, export, export_adapter, export_base, export_delta
from bombus_trainer.publish.host_copy import HostCopy
from tests.effort import effort, long_only
from tests.inference.backends.http_backends import BackendClient
from tests.inference.backends.small_engines import request
from tests.small_models import small_llama
from tests.trainer.backends.test_executor import batch
from tests.trainer.small_batches import tiny_model_folder, tiny_settings

Precision = Literal["float32", "bfloat16"]

# ---- the comparison -----------------------------------------------------------------------------------------------

LOGPROBS = tuple(-5.0 - 0.1 * (at % 7) for at in range(SEQUENCES * SCORED))


def moved(by: float, sequences: int = SEQUENCES, logprobs: tuple[float, ...] = LOGPROBS) -> tuple[float, ...]:
    """Return logprobs of which every second is `by` higher in the first `sequences`, and the others lower."""
    return tuple(each + (by if at % 2 else -by) * (at < sequences * SCORED) for at, each in enumerate(logprobs))


def expected(before: tuple[float, ...] | None = None, effect: float = 0.0, bits: str = "") -> Expected:
    canary = Canary(logprobs=LOGPROBS, dtype="float32", bits=bits, effect=effect)
    return Expected(7, canary, None if before is None else Canary(logprobs=before, dtype="float32"))


def test_the_sequences_follow_from_the_size_of_the_vocabulary_and_stay_within_it() -> None:
    for vocabulary in (5, 49_152):
        sequences = canary_sequences(vocabulary)
        assert sequences == canary_sequences(vocabulary)
        assert [len(sequence) for sequence in sequences] == [TOKENS] * SEQUENCES
        assert 0 <= min(map(min, sequences)) <= max(map(max, sequences)) < vocabulary
    assert canary_sequences(49_152) == sequences != canary_sequences(49_151)
    assert sequences[0][:4] == [14294, 17241, 12492, 27366], "logs have what these give"


def test_a_difference_within_rounding_passes_and_a_larger_one_is_said_with_both_figures() -> None:
    check = compare(expected(), moved(1e-5), IN_FLOAT64)
    assert check is not None
    assert (check.limit, check.way) == (1e-4, "in float64")
    assert check.difference == pytest.approx(1e-5)
    with pytest.raises(CanaryFailed) as failed:
        compare(expected(), moved(0.5), IN_FLOAT64)
    assert "version 7" in str(failed.value)
    assert "is -5.5 here and -5 at the trainer (0.5 apart; rounding explains 0.0001 in float64)" in str(failed.value)


def test_one_token_that_rounding_routes_to_another_expert_does_not_alarm_but_three_sequences_do() -> None:
    assert compare(expected(), moved(2.0, sequences=2), IN_FLOAT64) is not None
    with pytest.raises(CanaryFailed):
        compare(expected(), moved(2.0, sequences=3), IN_FLOAT64)


def test_the_change_of_a_step_that_is_missing_or_made_twice_is_found_below_the_limit() -> None:
    before = moved(9e-5)
    assert compare(expected(before), moved(1e-6), IN_FLOAT64) is not None
    with pytest.raises(CanaryFailed, match=r"the change since the version before were missing \(-1\.00 of it\)"):
        compare(expected(before), before, IN_FLOAT64)
    with pytest.raises(CanaryFailed, match=r"were made more than once \(\+1\.00 of it\)"):
        compare(expected(before), moved(-9e-5), IN_FLOAT64)
    assert compare(expected(before), before, SERVED["float32"]) is not None, "rounding hides it there"


def test_sums_of_bits_that_differ_and_figures_that_are_no_numbers_alarm() -> None:
    assert compare(expected(bits="aa"), LOGPROBS, IN_FLOAT64, "aa") is not None
    assert compare(expected(bits="aa"), LOGPROBS, IN_FLOAT64, "") is not None
    with pytest.raises(CanaryFailed, match="sum up to bb, but the trainer's to aa"):
        compare(expected(bits="aa"), LOGPROBS, IN_FLOAT64, "bb")
    with pytest.raises(CanaryFailed, match="not finite"):
        compare(expected(), (float("nan"), *LOGPROBS[1:]), IN_FLOAT64)
    assert compare(expected(), LOGPROBS[:-1], IN_FLOAT64) is None, "another version of bombus has other sequences"


def test_what_an_adapter_changes_widens_the_limit_where_its_factors_are_rounded() -> None:
    assert compare(expected(effect=1.0), moved(0.05), IN_FLOAT64.with_adapter_rounded()) is not None
    with pytest.raises(CanaryFailed):
        compare(expected(effect=1.0), moved(0.05), IN_FLOAT64)
    assert compare(expected(effect=1.0), moved(5.0), ELSEWHERE) is not None
    with pytest.raises(CanaryFailed):
        compare(expected(), moved(5.0), ELSEWHERE)


# ---- the figures --------------------------------------------------------------------------------------------------


def test_the_pass_in_float64_gives_the_models_own_logprobs_and_leaves_it_as_it_was() -> None:
    model = small_llama().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = torch.tensor(canary_logprobs(model))
    tokens_BT = torch.tensor(canary_sequences(model.config.vocab_size))
    with torch.no_grad():
        logprobs_BTV = torch.log_softmax(model(tokens_BT).logits, dim=-1)
    own = logprobs_BTV[:, :-1].gather(2, tokens_BT[:, 1:, None]).flatten()
    torch.testing.assert_close(found, own, atol=1e-5, rtol=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {value.dtype for value in model.parameters()} == {torch.float32}


def test_weights_in_float32_and_in_bfloat16_with_the_same_values_give_the_same_figures() -> None:
    half, whole = small_llama().eval(), small_llama().eval()
    for name, value in half.named_parameters():
        value.data = value.data.to(torch.bfloat16)
        whole.get_parameter(name).data = value.data.float()
    assert canary_logprobs(half) == canary_logprobs(whole)
    assert sum_of_bits(half.named_parameters()) == sum_of_bits(reversed(list(whole.named_parameters())))


def test_the_sum_of_bits_sees_one_bit_and_which_tensor_has_which_values() -> None:
    one, two = torch.randn(5, 3), torch.randn(5, 3)
    usual = sum_of_bits([("one", one), ("two", two)])
    assert usual != sum_of_bits([("one", two), ("two", one)])
    flipped = one.view(torch.int32).clone()
    flipped[0, 0] ^= 1
    assert usual != sum_of_bits([("one", flipped.view(torch.float32)), ("two", two)])


def test_weights_that_are_not_numbers_have_no_canary(tmp_path: Path) -> None:
    executor = Executor(tiny_model_folder(tmp_path), tiny_settings())
    executor.policy.network.get_output_embeddings().weight.data[3, 0] = torch.nan
    assert executor.canary() is None


@pytest.mark.parametrize("part", [ModelPart.MODEL, ModelPart.ADAPTER])
def test_training_goes_on_to_the_bit_as_without_a_canary(part: ModelPart, tmp_path: Path) -> None:
    changes: dict[str, object] = {"lora_rank": 4} if part == ModelPart.ADAPTER else {}
    settings = tiny_settings(lr=1e-3, gradient_checkpointing=True, **changes)
    made, plain = (Executor(tiny_model_folder(tmp_path / name), settings) for name in ("made", "plain"))
    random = torch.get_rng_state()
    for step in (1, 2, 3):
        assert made.canary(part) is not None
        made.train_step(batch(step), step)
        plain.train_step(batch(step), step)
    assert made.read_weights(sum_of_bits, part) == plain.read_weights(sum_of_bits, part)
    assert torch.equal(torch.get_rng_state(), random)


# ---- planted faults -----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The versions of a trainer, each with its canary."""

    root: Path
    executor: Executor
    adapted: bool
    base: Weights | None = None
    readies: list[WeightsReady] = field(default_factory=list)
    held: HostCopy = field(default_factory=HostCopy)

    def publish(self) -> None:
        """Publish the next version: an adapter, or a delta with a full copy beside it, and train a step."""
        version, part = len(self.readies), ModelPart.ADAPTER if self.adapted else ModelPart.MODEL
        target = VersionTarget(self.root, version, 1)
        if self.adapted:
            self.base = self.base or export_base(self.executor, self.root, 1)
            weights = export_adapter(self.executor, target, self.base)
        elif not self.readies:
            weights = export(self.executor, target, self.held)
        else:
            weights = export_delta(self.executor, target, self.held, self.readies[-1])
            full = export(self.executor, VersionTarget(self.root / "full", version, 1))
            shutil.copytree(full.where, weights.where, dirs_exist_ok=True)
        canary = self.executor.canary(part)
        assert canary is not None
        self.readies.append(WeightsReady(engine="main", run=1, version=version, weights=weights, canary=canary))
        self.executor.train_step(batch(version), version + 1)

    def folder(self, version: int) -> Path:
        return Path(self.readies[version].weights.where)

    def policy(self, version: int, delta: bool = False) -> Policy:
        """Return how a replica is given a version."""
        ready, before = self.readies[version], self.readies[version - 1] if version else None
        assert ready.canary is not None
        known = Expected(version, ready.canary, None if before is None else before.canary)
        base = Path(self.base.where) if self.base is not None else self.folder(version)
        adapter = self.folder(version) if self.adapted else None
        patch = self.folder(version) / DELTA_FILE if delta else None
        return Policy(base, 1, version, 256, patch, version - 1, adapter, expected=known)


def made_run(root: Path, dtype: str, rank: int, lr: float, model: Path | None = None, versions: int = 4) -> Run:
    changes: dict[str, object] = {"lora_rank": rank, "lora_alpha": 2 * rank} if rank else {}
    settings = tiny_settings(lr=lr, model={"dtype": dtype}, **changes)
    run = Run(root / "weights", Executor(model or tiny_model_folder(root / "model"), settings), bool(rank))
    for _ in range(versions):
        run.publish()
    return run


async def nothing(stage: str) -> None:
    pass


def backend(dtype: Precision, deliver: Callable[[list[Delivery]], None] = lambda made: None) -> TorchBackend:
    return TorchBackend(ComputeSettings(dtype=dtype, kv_cache_bytes=4 << 20, block_tokens=4), deliver)


def edited(policy: Policy, into: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Policy:
    """Return the policy with its file of tensors edited."""
    own = policy.folder if policy.adapter is None else policy.adapter
    shutil.copytree(own, into)
    name = FULL_FILE if policy.adapter is None else ADAPTER_FILE
    with safe_open(own / name, "pt") as file:
        metadata = file.metadata()
    save_file(edit(load_file(own / name)), into / name, metadata=metadata)
    if policy.adapter is None:
        return Policy(into, 1, policy.version, 256, expected=policy.expected)
    return Policy(policy.folder, 1, policy.version, 256, adapter=into, expected=policy.expected)


LAST = 3
FULL_FAULTS = ("last version's weights", "delta applied twice", "a layer missing")
ADAPTER_FAULTS = ("adapter not applied", "last version's weights", "alpha or rank wrong", "a layer missing")


def planted(run: Run, fault: str, into: Path) -> Policy:
    """Return the newest version as a replica with this fault would load it."""
    policy, before = run.policy(LAST), run.policy(LAST - 1)

    def of_before() -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = load_file(
            before.folder / FULL_FILE if before.adapter is None else before.adapter / ADAPTER_FILE
        )
        return tensors

    def layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        old = of_before()
        return {
            name: (old[name] if before.adapter is None else torch.zeros_like(value)) if "layers.1." in name else value
            for name, value in tensors.items()
        }

    match fault:
        case "adapter not applied":
            return Policy(policy.folder, 1, LAST, 256, expected=policy.expected)
        case "last version's weights":
            return edited(policy, into, lambda _: of_before())
        case "delta applied twice":
            old = of_before()
            return edited(
                policy,
                into,
                lambda new: {name: (2 * each.float() - old[name].float()).to(each.dtype) for name, each in new.items()},
            )
        case "alpha or rank wrong":
            return edited(
                policy,
                into,
                lambda new: {name: each * (2.0 if "lora_B" in name else 1.0) for name, each in new.items()},
            )
        case _:
            return edited(policy, into, layer)


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("lr", [1e-3, 1e-5])
async def test_planted_faults_of_whole_models_are_found(
    dtype: str, precision: Precision, lr: float, tmp_path: Path
) -> None:
    run = made_run(tmp_path, dtype, 0, lr)
    serving = backend(precision)
    try:
        for fault in FULL_FAULTS:
            await serving.load(run.policy(LAST - 1), nothing)
            with pytest.raises(CanaryFailed, match="version 3"):
                await serving.load(planted(run, fault, tmp_path / fault), nothing)
            assert serving.version == -1, "nothing is served"
            assert await serving.load(run.policy(LAST), nothing) is not None, "and it recovers"
    finally:
        await serving.stop()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("lr", [1e-3, 1e-5])
async def test_planted_faults_of_adapters_are_found(precision: Precision, lr: float, tmp_path: Path) -> None:
    run = made_run(tmp_path, "bfloat16", 4, lr)
    serving = backend(precision)
    try:
        for fault in ADAPTER_FAULTS:
            await serving.load(run.policy(LAST - 1), nothing)
            with pytest.raises(CanaryFailed, match="version 3"):
                await serving.load(planted(run, fault, tmp_path / fault), nothing)
            assert serving.version == -1
            assert await serving.load(run.policy(LAST), nothing) is not None
    finally:
        await serving.stop()


async def test_no_token_is_sampled_with_weights_that_fail_and_open_calls_may_be_tried_elsewhere(tmp_path: Path) -> None:
    run, client = made_run(tmp_path, "float32", 0, 1e-3), BackendClient()
    serving = backend("float32", client.deliver)
    try:
        await serving.load(run.policy(LAST - 1), nothing)
        tickets = [client.add(serving, request([1, 2, 3], max_tokens=240, stream=True)) for _ in range(200)]
        await client.until(lambda: client.sampled(tickets[0]) > 0)
        with pytest.raises(CanaryFailed):
            await serving.load(planted(run, "last version's weights", tmp_path / "stale"), nothing)
        ended = [await client.finished(ticket) for ticket in tickets]
        assert {version for each in ended for made in each.choices.values() for version in made.versions} == {LAST - 1}
        assert ended[-1].fault is not None, "there was more to do than could be done meanwhile"
        assert ended[-1].fault.retry
        assert (await client.refused(serving, request([1]))).retry
    finally:
        await serving.stop()


async def test_a_prefix_cache_of_other_weights_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, made = made_run(tmp_path, "bfloat16", 0, 1e-4), list[Delivery]()
    serving = backend("float32", made.extend)
    try:
        await serving.load(run.policy(0), nothing)
        serving.add(1, request(list(range(12))))
        while not any(delivery.done for delivery in made):
            await serving.adapters()  # passes through the engine's thread
        monkeypatch.setattr(Blocks, "forget_all", lambda blocks: None)
        with pytest.raises(CanaryFailed, match=r"prefix cache still has [1-9][0-9]* blocks"):
            await serving.load(run.policy(1, delta=True), nothing)
        assert serving.version == -1
    finally:
        await serving.stop()


# ---- healthy swaps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("dtype", "rank"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 4)])
async def test_healthy_swaps_never_alarm(dtype: str, rank: int, precision: Precision, tmp_path: Path) -> None:
    """In all, a thousand with the long tests: full copies, deltas and adapters, after a load and after being asleep."""
    run = made_run(tmp_path, dtype, rank, 1e-4, versions=1)
    serving = backend(precision)
    compared = 0
    try:
        for version in range(effort(8, 170)):
            if version:
                run.publish()
            delta = run.readies[version].weights.format == DELTA_FORMAT and version % 3 == 1
            compared += await serving.load(run.policy(version, delta=delta), nothing) is not None
            if version % 16 == 5:
                await serving.unload()
                compared += await serving.load(run.policy(version), nothing) is not None
    finally:
        await serving.stop()
    assert compared >= effort(8, 170)


def test_a_run_of_merged_adapters_has_the_canary_of_what_it_publishes(tmp_path: Path) -> None:
    run = made_run(tmp_path, "bfloat16", 4, 1e-2, versions=2)
    weights = export(run.executor, VersionTarget(tmp_path / "merged", 2, 1))
    canary = run.executor.canary(ModelPart.MODEL)
    assert canary is not None

    model = load_model(Path(weights.where), "float32")
    assert compare(Expected(2, canary), canary_logprobs(model), IN_FLOAT64, sum_of_bits(model.named_parameters()))
    assert run.executor.canary(ModelPart.ADAPTER) != canary


@long_only
@pytest.mark.parametrize("rank", [0, 16])
async def test_smollm2_at_a_low_learning_rate_is_served_and_its_faults_are_found(rank: int, tmp_path: Path) -> None:
    run = made_run(tmp_path, "bfloat16", rank, 1e-5 if rank else 1e-6, resolve_model("smollm2"))
    serving = backend("float32")
    try:
        for fault in ADAPTER_FAULTS if rank else FULL_FAULTS:
            assert await serving.load(run.policy(LAST - 1), nothing) is not None
            with pytest.raises(CanaryFailed, match="version 3"):
                await serving.load(planted(run, fault, tmp_path / fault), nothing)
            shutil.rmtree(tmp_path / fault, ignore_errors=True)
    finally:
        await serving.stop()
