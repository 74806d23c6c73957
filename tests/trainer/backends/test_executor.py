"""Whole steps on a tiny model: they learn, they repeat bit for bit, and they never update on corrupted input."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bombus.config.job import RunConfig
from bombus.errors import EngineFault
from bombus.hive.records import digest
from bombus.weights.adapters import adapter_names
from bombus.weights.checkpoints import CheckpointDamaged, CheckpointLost
from bombus_trainer.backend import Interrupted
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.backends.torch.optim import learning_rate
from bombus_trainer.data.batch import EpisodeCalls, EpisodeGroup
from bombus_trainer.data.packing import pack
from bombus_trainer.loading import load_executor
from bombus_trainer.publish.directories import remove_others
from bombus_trainer.publish.export import VersionTarget, export
from bombus_trainer.publish.step_checkpoint import StepFacts, load_step
from bombus_trainer.settings import TrainerSettings
from tests.trainer.small_batches import VOCAB, call, episode, item, tiny_model_folder, tiny_settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def facts(step: int, attempt: int = 1) -> StepFacts:
    return StepFacts(
        engine="main", run=1, step=step, trainer_epoch=1, attempt=attempt, config_digest="c", metrics={"loss": 1.0}
    )


def two_turns(name: str, seed: int, reward: float) -> EpisodeCalls:
    """Make two turns of arbitrary tokens, with logprobs near those of a uniform policy."""
    random = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=random).tolist()

    first = call(f"{name}a", list(range(20)), draw(3), logprob=-math.log(VOCAB))
    second = call(f"{name}b", draw(4), draw(5), parent=first, logprob=-math.log(VOCAB))
    return episode(name, reward, first, second)


def batch(seed: int = 0) -> list[EpisodeGroup]:
    return [
        EpisodeGroup(
            f"task{g}",
            tuple(two_turns(f"e{g}{i}", 100 * seed + 10 * g + i, reward=float(i % 2)) for i in range(4)),
        )
        for g in range(3)
    ]


def weights_of(executor: Executor) -> dict[str, bytes]:
    return {name: digest(value.detach().numpy().tobytes()) for name, value in executor.model.parameters.items()}


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}, {"mini_batch_num": 2, "ppo_epochs": 2}])
def test_the_same_seed_gives_the_same_bytes_after_three_steps(folder: Path, changes: dict[str, object]) -> None:
    found = []
    for _ in range(2):
        executor = Executor(folder, tiny_settings(**changes))
        for step in (1, 2, 3):
            executor.train_step(batch(step), step)
        found.append(weights_of(executor))
    assert found[0] == found[1]
    assert found[0] != weights_of(Executor(folder, tiny_settings(**changes)))


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}])
def test_a_step_after_a_restart_is_the_step_without_one(
    folder: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    settings = tiny_settings(**changes)
    executor = Executor(folder, settings)
    executor.train_step(batch(1), 1)
    saved = executor.save(tmp_path, facts(1))
    executor.train_step(batch(2), 2)
    restarted = Executor(folder, settings)
    restarted.restore(saved.path, saved.digest)
    restarted.train_step(batch(2), 2)
    assert weights_of(restarted) == weights_of(executor)


@pytest.mark.parametrize("changes", [{"lr": 0.02}, {"lr": 0.05, "lora_rank": 4}])
def test_grpo_learns_which_arm_pays(folder: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    """Every third token pays. Tokens are sampled from exported weights, which closes the whole loop."""
    executor = Executor(folder, tiny_settings(**changes))
    prompt = list(range(18))
    random = torch.Generator().manual_seed(0)
    rewards = []
    for step in range(1, 13):
        weights = export(executor, VersionTarget(tmp_path, step - 1, 1))
        sampler = AutoModelForCausalLM.from_pretrained(weights.where, dtype=torch.float32)
        with torch.no_grad():
            logprobs = torch.log_softmax(sampler(torch.tensor([prompt])).logits[0, -1], dim=-1)
        arms = torch.multinomial(logprobs.exp(), 32, replacement=True, generator=random).tolist()
        episodes = [
            episode(f"e{i}", float(arm % 3 == 0), call(f"c{i}", prompt, [arm], logprob=float(logprobs[arm])))
            for i, arm in enumerate(arms)
        ]
        metrics = executor.train_step([EpisodeGroup("arms", tuple(episodes))], step)
        assert metrics.get("kl_sampler_abs", 0.0) < 1e-3  # none once all arms pay
        rewards.append(metrics["reward_mean"])
    assert rewards[0] < 0.7
    assert rewards[-1] > 0.9


def test_a_group_without_signal_changes_nothing(folder: Path) -> None:
    executor = Executor(folder, tiny_settings())
    before = weights_of(executor)
    same = EpisodeGroup("t", tuple(two_turns(f"e{i}", i, reward=1.0) for i in range(4)))
    metrics = executor.train_step([same], 1)
    assert weights_of(executor) == before
    assert (metrics["updates"], metrics["groups_without_signal"], metrics["tokens_computed"]) == (0, 1, 0)
    measured_by_training = {"loss", "grad_norm", "entropy", "kl_sampler", "clip_fraction", "model_flops_per_s"}
    assert not measured_by_training & metrics.keys(), "nothing was computed, so nothing was measured"
    assert "reward_mean" not in executor.train_step([], 2)


def test_the_metrics_say_what_was_computed(folder: Path) -> None:
    metrics = Executor(folder, tiny_settings()).train_step(batch(), 3)
    assert metrics["tokens_trained"] == 3 * 4 * (3 + 5)
    assert metrics["sequences"] == 12
    assert metrics["merged_share"] == 0.5
    assert metrics["tokens_unshared"] == 12 * (20 + 3 + 4 + 5 - 1)
    assert metrics["tokens_computed"] <= 20 + 12 * (3 + 4 + 5 - 1)  # one prompt for all
    assert metrics["reward_mean"] == 0.5
    assert metrics["staleness_mean"] == 2  # sampled under version 0, trained from version 2
    assert metrics["lr"] == 1e-2


def test_a_step_reports_its_flops_per_second(folder: Path) -> None:
    executor = Executor(folder, tiny_settings(mini_batch_num=2))
    metrics = executor.train_step(batch(), 1)
    seconds = sum(value for name, value in metrics.items() if name.startswith("seconds_"))
    # 3,072 elements of attention's and 6,144 of the rest's matrices in each of 2 layers, trained, and old logprobs.
    least = (6 + 2) * 2 * (3072 + 6144) * metrics["tokens_computed"]
    assert least < metrics["model_flops_per_s"] * seconds < 1.5 * least
    assert "mfu" not in metrics


def test_an_episode_with_corrupted_records_is_left_out_of_its_group(folder: Path) -> None:
    executor = Executor(folder, tiny_settings())
    outside = episode("odd", 100.0, call("odd", [1, 2], [VOCAB + 5]))
    (group, *_) = batch()
    metrics = executor.train_step([EpisodeGroup(group.task, (*group.episodes, outside))], 1)
    assert metrics["episodes_left_out"] == 1
    other = Executor(folder, tiny_settings())
    other.train_step([group], 1)
    assert weights_of(executor) == weights_of(other)


def absurd_batch(reward: float) -> list[EpisodeGroup]:
    """Make a batch that has no finite gradient, for its reward is very large."""
    (group, *_) = batch()
    return [EpisodeGroup("t", (*group.episodes, two_turns("e", 5, reward)))]


def state_of(executor: Executor) -> dict[str, bytes]:
    return {name: digest(value.contiguous().numpy().tobytes()) for name, value in executor.tensors().items()}


def test_an_update_that_is_not_finite_is_left_out_counted_and_made_again_to_the_same_bytes(folder: Path) -> None:
    steps = [batch(1), absurd_batch(1e38), batch(2)]
    found = []
    for _ in range(2):
        executor = Executor(folder, tiny_settings(normalise_by_std=False))
        executor.train_step(steps[0], 1)
        before = state_of(executor)
        metrics = executor.train_step(steps[1], 2)
        assert state_of(executor) == before, "parameters and optimizer stay as they are"
        assert (metrics["updates"], metrics["updates_left_out"]) == (0, 1)
        assert all(math.isfinite(value) for name, value in metrics.items() if not name.startswith("reward_"))
        assert executor.train_step(steps[2], 3)["updates_left_out"] == 0
        found.append(state_of(executor))
    assert found[0] == found[1]


def test_only_the_mini_batch_that_is_not_finite_is_left_out(folder: Path) -> None:
    executor = Executor(folder, tiny_settings(normalise_by_std=False, mini_batch_num=2))
    (good, *_) = batch()
    metrics = executor.train_step([good, *absurd_batch(1e38)], 1)
    assert (metrics["updates"], metrics["updates_left_out"]) == (1, 1)


@pytest.mark.parametrize("rewards", [(math.inf, 0.0), (math.nan, 0.0), (1e300, -1e300), (1.7e308, 1e308)])
@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_a_group_whose_advantages_are_not_finite_is_left_out_alone(
    folder: Path, rewards: tuple[float, float], estimator: str
) -> None:
    settings = tiny_settings(normalise_by_std=False, adv_estimator=estimator)
    absurd = EpisodeGroup("t", tuple(two_turns(name, 5, reward) for name, reward in zip("ef", rewards)))
    found = []
    for groups in (batch(), [*batch(), absurd]):
        executor = Executor(folder, settings)
        metrics = executor.train_step(groups, 1)
        found.append(weights_of(executor))
        assert metrics["groups_left_out"] == len(groups) - len(batch())
    assert found[0] == found[1]


def test_a_step_is_interrupted_between_micro_batches(folder: Path) -> None:
    executor = Executor(folder, tiny_settings(bin_tokens=64))
    asked = iter([False, False, True])
    before = weights_of(executor)
    with pytest.raises(Interrupted):
        executor.train_step(batch(), 1, lambda: next(asked))
    assert weights_of(executor) == before


def test_micro_batches_add_up_to_the_update_of_the_whole(folder: Path) -> None:
    found = []
    for bin_tokens in (64, 4096):
        executor = Executor(folder, tiny_settings(bin_tokens=bin_tokens))
        found.append(executor.train_step(batch(), 1))
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-4)
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], abs=1e-5)


ALGORITHMS: list[dict[str, object]] = [
    {"adv_estimator": "reinforce_plus_plus_baseline", "loss_aggregation": "token"},
    {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    {"loss": "cispo", "entropy_coef": 0.01},
    {"loss": "importance_sampling", "correction": "sequence_tis"},
    {"correction": "sequence_mask", "use_opsm": True, "opsm_delta": 0.01},
    {"correction": "icepop", "tis_clip_low": 0.2, "tis_clip": 5.0},
    {"kl_coef": 0.1, "kl_estimator": "k2", "loss_aggregation": "constant"},
]


@pytest.mark.parametrize("changes", ALGORITHMS, ids=lambda changes: next(iter(changes.values())))
def test_sharing_prefixes_and_splitting_bins_changes_no_algorithm(folder: Path, changes: dict[str, object]) -> None:
    """Packed and shared, or each sequence in its own bin: losses and gradients are the same over two updates."""
    found = []
    for layout in ({"bin_tokens": 4096}, {"bin_tokens": 16, "share_prefixes": False}):
        executor = Executor(folder, tiny_settings(ppo_epochs=2, **changes, **layout))
        found.append(executor.train_step(batch(), 1))
    names = ("loss", "grad_norm", "clip_fraction", "importance_capped", "masked_share", "kl_sampler", "entropy")
    assert found[0]["grad_norm"] > 0
    assert [found[1][name] for name in names] == pytest.approx([found[0][name] for name in names], rel=2e-3, abs=1e-5)


def test_matrices_decay_and_vectors_do_not(folder: Path) -> None:
    executor = Executor(folder, tiny_settings(weight_decay=0.5))
    before = {name: value.detach().clone() for name, value in executor.model.parameters.items()}
    for value in executor.model.parameters.values():
        value.grad = torch.zeros_like(value)
    executor.take_step(0.1)
    assert {value.ndim for value in before.values()} == {1, 2}
    for name, value in executor.model.parameters.items():
        torch.testing.assert_close(value.detach(), before[name] * (1.0 if value.ndim == 1 else 1.0 - 0.1 * 0.5))


@pytest.mark.parametrize(
    ("changes", "clipped"), [({}, False), ({"ppo_epochs": 2}, True), ({"mini_batch_num": 2}, True)]
)
def test_after_the_first_update_on_a_batch_the_ratio_is_to_the_policy_from_before_it(
    folder: Path, changes: dict[str, object], clipped: bool
) -> None:
    """Tokens of the second update have moved by more than the clip. Where that makes them worse they are clipped."""
    executor = Executor(folder, tiny_settings(clip_low=1e-5, clip_high=1e-5, **changes))
    metrics = executor.train_step(batch(), 1)
    assert metrics["updates"] == (2 if clipped else 1)
    assert metrics["clip_fraction"] > 0.05 if clipped else metrics["clip_fraction"] == 0.0
    assert metrics["ratio_max"] > 1.00001 if clipped else metrics["ratio"] == metrics["ratio_max"] == 1.0
    assert metrics["kl_sampler_abs_max"] >= metrics["kl_sampler_abs"] > 0.0
    assert metrics["kl_sampler"] == pytest.approx(
        Executor(folder, tiny_settings()).train_step(batch(), 1)["kl_sampler"]
    )


def test_an_entropy_bonus_widens_the_distribution(folder: Path) -> None:
    entropies = []
    for coefficient in (0.0, 1.0):
        executor = Executor(folder, tiny_settings(entropy_coef=coefficient))
        for step in (1, 2, 3):
            executor.train_step(batch(), step)
        entropies.append(executor.train_step(batch(), 4)["entropy"])
    assert entropies[1] > entropies[0] + 0.1


def test_without_packing_each_sequence_is_computed_alone_and_the_update_is_the_same(folder: Path) -> None:
    found = []
    for packing in (False, True):
        executor = Executor(folder, tiny_settings(enable_packing=packing))
        found.append(executor.train_step(batch(), 1))
    alone, packed = found
    assert alone["bins"] == 3 * 4
    assert packed["bins"] == 1
    assert alone["tokens_computed"] > packed["tokens_computed"]
    assert alone["grad_norm"] == pytest.approx(packed["grad_norm"], rel=1e-4)


def test_a_kl_term_pulls_back_to_the_initial_model(folder: Path) -> None:
    executor = Executor(folder, tiny_settings(kl_coef=0.5))
    assert executor.train_step(batch(1), 1)["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert executor.train_step(batch(2), 2)["kl_reference"] > 0.0


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4, "lora_alpha": 8}])
@pytest.mark.parametrize("tied", [True, False])
def test_exported_weights_load_with_transformers_and_compute_the_same(
    tmp_path: Path, tied: bool, changes: dict[str, object]
) -> None:
    executor = Executor(tiny_model_folder(tmp_path / "model", tied), tiny_settings(**changes))
    executor.train_step(batch(), 1)
    weights = export(executor, VersionTarget(tmp_path / "weights", 1, 1, "tok"))
    place = Path(weights.where)
    assert weights.bytes == (place / "model.safetensors").stat().st_size
    assert (place / "chat_template.jinja").exists()
    served = AutoModelForCausalLM.from_pretrained(place)
    wanted = item(list(range(10)), list(range(1, 10)))
    (packed,) = pack([wanted], 100)
    with torch.no_grad(), executor.training():
        ours = executor.policy.score(packed).logprobs_N
        logits = served(torch.arange(9)[None]).logits[0]
        theirs = torch.log_softmax(logits, dim=-1)[torch.arange(9), torch.arange(1, 10)]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_an_export_of_adapters_is_base_plus_scaled_b_a(folder: Path, tmp_path: Path) -> None:
    executor = Executor(folder, tiny_settings(lora_rank=4, lora_alpha=8))
    executor.train_step(batch(), 1)
    base = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    served = AutoModelForCausalLM.from_pretrained(export(executor, VersionTarget(tmp_path, 1, 1)).where).state_dict()
    name = "model.layers.1.mlp.down_proj"
    low_a, low_b = (executor.model.parameters[factor].detach() for factor in adapter_names(name))
    product = low_b @ low_a
    assert product.abs().max() > 0
    torch.testing.assert_close(served[f"{name}.weight"], base[f"{name}.weight"] + 2.0 * product)
    torch.testing.assert_close(served["lm_head.weight"], base["lm_head.weight"])


def test_a_bfloat16_model_is_trained_in_float32_and_served_in_bfloat16(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", dtype=torch.bfloat16)
    executor = Executor(folder, tiny_settings())
    assert {value.dtype for value in executor.model.parameters.values()} == {torch.float32}
    served = AutoModelForCausalLM.from_pretrained(
        export(executor, VersionTarget(tmp_path / "weights", 0, 1)).where, dtype="auto"
    )
    assert served.dtype == torch.bfloat16


def test_the_configuration_of_a_version_names_no_quantization_that_its_tensors_do_not_have(
    folder: Path, tmp_path: Path
) -> None:
    executor = Executor(folder, tiny_settings())
    config = json.loads(executor.files["config.json"])
    quantized = json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}})
    executor.files["config.json"] = quantized.encode()
    place = Path(export(executor, VersionTarget(tmp_path, 0, 1)).where)
    assert json.loads((place / "config.json").read_text()) == {**config, "dtype": "float32"}


def test_a_checkpoint_with_one_changed_byte_is_refused(folder: Path, tmp_path: Path) -> None:
    executor = Executor(folder, tiny_settings())
    executor.train_step(batch(), 1)
    saved = executor.save(tmp_path, facts(1))
    place = saved.path
    for name in ("state.safetensors", "manifest.json"):
        whole = (place / name).read_bytes()
        middle = len(whole) // 2
        (place / name).write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        with pytest.raises(CheckpointDamaged, match="damaged"):
            load_step(place, saved.digest)
        (place / name).write_bytes(whole)
    assert load_step(place, saved.digest).keys() == executor.tensors().keys()
    with pytest.raises(CheckpointLost, match="cannot be read"):
        load_step(tmp_path / "nowhere", saved.digest)


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    saved = Executor(folder, tiny_settings(lora_rank=4)).save(tmp_path, facts(1))
    with pytest.raises(EngineFault, match="another model"):
        Executor(folder, tiny_settings()).restore(saved.path, saved.digest)


def test_only_what_the_log_names_is_kept_and_nothing_of_a_later_trainer_is_touched(
    folder: Path, tmp_path: Path
) -> None:
    executor = Executor(folder, tiny_settings())
    saved = [executor.save(tmp_path / "c", facts(step)) for step in (1, 2, 3)]
    for name in (".draft-epoch-1-left", ".draft-epoch-2-being-written", "step-00000009-epoch-2-attempt-1"):
        (tmp_path / "c" / name).mkdir()
    remove_others(tmp_path / "c", [str(saved[1].path), str(saved[2].path)], trainer_epoch=1)
    assert sorted(place.name for place in (tmp_path / "c").iterdir()) == [
        ".draft-epoch-2-being-written",
        "step-00000002-epoch-1-attempt-1",
        "step-00000003-epoch-1-attempt-1",
        "step-00000009-epoch-2-attempt-1",
    ]
    where = [export(executor, VersionTarget(tmp_path / "w", version, 1)).where for version in (0, 1, 2)]
    remove_others(tmp_path / "w", where[1:], trainer_epoch=1)
    assert sorted(str(place) for place in (tmp_path / "w").iterdir()) == where[1:]


def test_the_learning_rate_warms_up_and_decays() -> None:
    linear = tiny_settings(lr=1.0, warmup_steps=2, lr_schedule="linear", total_steps=6, min_lr_ratio=0.2)
    assert [learning_rate(step, linear) for step in range(1, 8)] == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    cosine = tiny_settings(lr=1.0, lr_schedule="cosine", total_steps=4, min_lr_ratio=0.2)
    assert [learning_rate(step, cosine) for step in (1, 3, 5)] == pytest.approx([1.0, 0.6, 0.2])
    assert learning_rate(10**6, tiny_settings(lr=0.1)) == 0.1


def _first_update(folder: Path, divisor: int, **changes: object) -> torch.Tensor:
    """Return by how much a first step moves each parameter, in units of the learning rate."""
    lengths = {"max_response_length": divisor, "max_response_length_in_one_turn": 10, "max_model_len": divisor + 3000}
    settings = tiny_settings(lengths, lr=1e-3, adv_estimator="dr_grpo", **changes)
    executor = Executor(folder, settings)
    before = [value.detach().clone() for value in executor.model.parameters.values()]
    groups = [EpisodeGroup("t", tuple(two_turns(f"e{i}", i, reward=0.01 * i) for i in range(2)))]
    executor.train_step(groups, 1)
    moved = [(value.detach() - old).flatten() for value, old in zip(executor.model.parameters.values(), before)]
    return torch.cat(moved) / 1e-3


@pytest.mark.parametrize("divisor", [10, 15_000, 1 << 20])
def test_a_first_update_with_dr_grpo_has_the_size_of_the_learning_rate_whatever_it_divides_by(
    folder: Path, divisor: int
) -> None:
    found = _first_update(folder, divisor)
    wanted = _first_update(folder, divisor, loss_aggregation="token")
    assert float(found.abs().median()) == pytest.approx(1.0, abs=0.01)
    assert float(found.abs().mean()) == pytest.approx(float(wanted.abs().mean()), rel=0.01)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_past_its_total_steps_a_run_goes_on_learning_at_a_tenth_of_its_rate(schedule: str) -> None:
    settings = tiny_settings(lr=1.0, lr_schedule=schedule, total_steps=4)
    assert [learning_rate(step, settings) for step in (5, 6, 10**6)] == pytest.approx([0.1, 0.1, 0.1])


def test_a_job_of_verl_is_refused_by_the_torch_backend() -> None:
    job = RunConfig.model_validate({"trainer": {"backend": "verl"}})
    with pytest.raises(EngineFault, match="only be done with the torch backend"):
        load_executor(TrainerSettings(job=job))


def test_a_load_says_what_it_loads_and_that_it_may_take_a_while(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load_executor(tiny_settings(model={"path": str(folder)}))
    assert f"loading {folder}, 93 kB of weights: this takes seconds to minutes" in caplog.text


@pytest.mark.parametrize("changes", [{"lora_rank": 4}, {}, {"gradient_checkpointing": True}])
def test_the_reference_is_the_model_that_training_began_with(folder: Path, changes: dict[str, object]) -> None:
    executor = Executor(folder, tiny_settings(kl_coef=0.1, **changes))
    (packed,) = pack([item(list(range(10)), list(range(4, 10)))], 100)
    with executor.training():
        before = executor.policy.score(packed).logprobs_N.detach()
        with torch.no_grad():
            for parameter in executor.model.parameters.values():
                parameter.add_(0.05)
        assert (executor.policy.score(packed).logprobs_N - before).abs().max() > 0.01
        torch.testing.assert_close(executor.reference_logprobs(packed), before)
