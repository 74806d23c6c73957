"""A job: how AgentJet's YAML and our own block are read, and what is refused."""

import json
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bombus import Job
from bombus.config.documents import RunConfig, derive_lengths, no_effect, parse_job, read_job_file, to_yaml
from bombus.config.trainer import TrainerConfig
from bombus.errors import Code, Refused
from bombus.hive.events import Collection, Method
from bombus.sdk.job import KEYWORDS

AGENTJET = """
ajet:
  project_name: math
  backbone: verl
  model: {path: /models/qwen}
  task_reader: {type: random_dummy, nested: {deep: [1, 2]}}
  data: {train_batch_size: 16, max_prompt_length: 1000, max_response_length: 2000}
  rollout: {num_repeat: 8, max_env_worker: 64, max_response_length_in_one_turn: 500, max_model_len: 3000, name: vllm}
  trainer_common:
    logger: tensorboard
    algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
    mini_batch_num: 2
    ppo_epochs: 3
    optim: {lr: 1e-5, lr_warmup_steps: -1, total_training_steps: -1, betas: [0.8, 0.9], optimizer: AdamW}
  lora: {lora_rank: 16, lora_alpha: 32, target_modules: all-linear, load_format: auto}
  swarm_mode_sample_collection_method: rollout_until_finish_enough_non_dummy_tasks
  swarm_mode_sample_collection_max_cached_episodes: 500
hydra: {run: {dir: somewhere}}
defaults: [verl_default, ajet_default, _self_]
"""


def refusal(job: Any) -> str:
    with pytest.raises(Refused) as caught:
        parse_job(job)
    assert caught.value.code == Code.BAD_CONFIG
    return caught.value.why


def test_an_empty_job_has_the_contracts_defaults() -> None:
    config = parse_job({})
    assert config.model.path == "Qwen/Qwen2.5-7B-Instruct"
    assert config.collection.method == Method.ENOUGH_TASKS
    assert (config.collection.batch_size, config.rollout.num_repeat, config.rollout.max_env_worker) == (32, 4, 128)
    lengths = config.rollout
    assert (lengths.max_prompt_length, lengths.max_response_length) == (3000, 15000)
    assert (lengths.max_response_length_in_one_turn, lengths.max_model_len) == (4096, 18000)
    assert (config.trainer.lr, config.trainer.mini_batch_num, config.trainer.ppo_epochs) == (1e-6, 1, 1)
    assert (config.trainer.lora_rank, config.trainer.lora_alpha) == (0, 16)
    assert config.collection.max_cached_episodes == 9999


def test_agentjets_yaml_is_read() -> None:
    config = parse_job(AGENTJET)
    assert config.experiment.project_name == "math"
    assert config.model.path == "/models/qwen"
    assert config.collection.method == Method.ENOUGH_NON_DUMMY_TASKS
    assert config.collection.batch_size == 16
    assert config.collection.max_cached_episodes == 500
    assert (config.rollout.num_repeat, config.rollout.max_model_len) == (8, 3000)
    assert config.trainer.lr == 1e-5  # which YAML 1.1 reads as text
    assert config.trainer.betas == (0.8, 0.9)
    assert (config.trainer.warmup_steps, config.trainer.total_steps) == (0, 0)  # -1 means "not set" in AgentJet
    assert (config.trainer.lora_rank, config.trainer.lora_alpha) == (16, 32)


def test_adapters_are_trained_at_ten_times_the_rate_of_all_weights_unless_the_job_gives_one() -> None:
    assert trainer().lr == 1e-6
    assert trainer(lora_rank=8).lr == 1e-5
    assert trainer(lora_rank=8, lr=2e-6).lr == 2e-6
    assert parse_job({"ajet": {"lora": {"lora_rank": 8}}}).trainer.lr == 1e-5
    assert Job(model="tiny", lora_rank=8).run.trainer.lr == 1e-5


@pytest.mark.parametrize(("switch", "wanted"), [(None, 0.002), (True, 0.002), (False, 0.0)])
def test_agentjets_kl_coefficient_counts_while_its_switch_is_on(switch: bool | None, wanted: float) -> None:
    common = {"kl_loss_coef": 0.002} | ({} if switch is None else {"use_kl_loss": switch})
    config = parse_job({"ajet": {"trainer_common": common}})
    assert config.trainer.kl_coef == wanted
    assert config.ignored == ()


@pytest.mark.parametrize("beside", [{}, {"ajet": {}}])
@pytest.mark.parametrize("switch", [None, True, False])
def test_verls_kl_coefficient_counts_by_default_only_in_agentjets_documents(
    beside: dict[str, Any], switch: bool | None, tmp_path: Path
) -> None:
    actor = {"kl_loss_coef": 0.002} | ({} if switch is None else {"use_kl_loss": switch})
    tree = {**beside, "actor_rollout_ref": {"model": {"path": "tiny"}, "actor": actor}}
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(tree))
    wanted = 0.002 if switch or (switch is None and beside) else 0.0
    assert parse_job(tree).trainer.kl_coef == Job(base_yaml_config=path).run.trainer.kl_coef == wanted


def test_keys_without_effect_are_listed_and_not_refused() -> None:
    ignored = parse_job(AGENTJET).ignored
    assert "ajet.task_reader" in ignored
    assert "ajet.rollout.name" in ignored
    assert "ajet.trainer_common.logger" not in ignored
    assert "ajet.trainer_common.optim.optimizer" not in ignored
    assert not any(path.startswith(("ajet.model", "hydra", "defaults")) for path in ignored)


def test_our_own_block_wins() -> None:
    config = parse_job({"ajet": {"model": {"path": "a"}}, "bombus": {"model": {"path": "tiny", "dtype": "float32"}}})
    assert (config.model.path, config.model.dtype) == ("tiny", "float32")


def test_the_length_of_a_packed_row_may_have_either_of_its_names() -> None:
    assert RunConfig().trainer.max_tokens_per_bin == 32_000
    for name in ("max_tokens_per_bin", "sample_packing_sequence_len"):
        assert parse_job({"bombus": {"trainer": {name: 500}}}).trainer.max_tokens_per_bin == 500
    assert "bombus.trainer.sample_packing_sequence_len = 1" in refusal(
        {"bombus": {"trainer": {"sample_packing_sequence_len": 1}}}
    )
    both = {"bombus": {"trainer": {"max_tokens_per_bin": 500, "sample_packing_sequence_len": 500}}}
    assert "set the same thing: give only one of them" in refusal(both)


@pytest.mark.parametrize("name", ["enough_episodes", "finish_enough_episodes", "rollout_until_finish_enough_episodes"])
def test_short_names_of_methods_are_accepted(name: str) -> None:
    job = {"ajet": {"swarm_mode_sample_collection_method": name}}
    assert parse_job(job).collection.method == Method.ENOUGH_EPISODES


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"ajet": {"rollout": {"num_repeat": 0}}}, ["ajet.rollout.num_repeat = 0", "at least 1", "at most 4096"]),
        ({"ajet": {"rollout": {"num_repeat": True}}}, ["ajet.rollout.num_repeat = true", "whole number"]),
        ({"ajet": {"rollout": {"num_repeat": "4"}}}, ["ajet.rollout.num_repeat", "whole number"]),
        ({"ajet": {"rollout": {"num_repeat": 4.5}}}, ["4.5"]),
        ({"ajet": {"trainer_common": {"optim": {"lr": "fast"}}}}, ["ajet.trainer_common.optim.lr", '"fast"']),
        ({"ajet": {"model": 3}}, ["ajet.model must be a mapping"]),
        ({"ajet": []}, ["ajet must be a mapping"]),
        ({"bombus": {"trainer": {"lrr": 1}}}, ["bombus.trainer.lrr is unknown", "trainer.lr"]),
        ({"bombus": {"train": {}}}, ["bombus.train is unknown"]),
        ({"bombus": {"ignored": ["x"]}}, ["bombus.ignored is unknown"]),
        ({"bombus": {"trainer": {"lr": float("nan")}}}, ["bombus.trainer.lr = NaN"]),
        ({"bombus": {"collection": {"method": "never"}}}, ["bombus.collection.method", "enough_tasks"]),
        ({"bombus": {"trainer": {"betas": [0.9]}}}, ["bombus.trainer.betas"]),
        ({"bombus": {"trainer": {"backend": "jax"}}}, ["torch, verl"]),
        (
            {"ajet": {"trainer_common": {"algorithm": {"adv_estimator": "sgd"}}}},
            ['ajet.trainer_common.algorithm.adv_estimator = "sgd"', "grpo, rloo, opo, dr_grpo", "backend verl"],
        ),
        (
            {"bombus": {"trainer": {"adv_estimator": "gae"}}},
            ["needs a critic, which bombus does not train: use verl's"],
        ),
        ({"bombus": {"trainer": {"adv_estimator": "GAE", "backend": "verl"}}}, ['"GAE" is refused: it needs a critic']),
        ({"bombus": {"trainer": {"advantage_estimator": "ppo"}}}, ['advantage_estimator = "ppo" is refused: it needs']),
        ({"bombus": {"trainer": {"loss": "sapo"}}}, ["clipped, gspo, cispo, importance_sampling"]),
        ({"bombus": {"trainer": {"correction": "tis"}}}, ["one of none, token_tis, sequence_tis, icepop"]),
        (
            {"bombus": {"trainer": {"loss_aggregation": "sum"}}},
            ["one of episode, token, constant, episode_sum, token_sum"],
        ),
        ({"bombus": {"trainer": {"kl_estimator": "abs"}}}, ["one of k1, k2, k3, k3_unbiased"]),
        ({"bombus": {"trainer": {"correction": "icepop"}}}, ["needs a tis_clip_low and a tis_clip above 0"]),
        ({"bombus": {"trainer": {"tis_clip_low": 3.0}}}, ["tis_clip_low 3.0 exceeds tis_clip 2.0"]),
        ({"bombus": {"trainer": {"dual_clip": 0.5}}}, ["dual_clip 0.5", "more than 1"]),
        ({"bombus": {"trainer": {"dual_clip": 3, "loss": "gspo"}}}, ["only to the loss `clipped`, not to `gspo`"]),
        ({"bombus": {"trainer": {"overlong": "penalty"}}}, ["needs an overlong_buffer of at least 1 token"]),
        ({"bombus": {"trainer": {"lr_schedule": "cosine"}}}, ["lr_schedule cosine needs total_steps"]),
        (
            {"ajet": {"trainer_common": {"optim": {"lr_scheduler_type": "linear", "total_training_steps": -1}}}},
            ["lr_schedule linear needs total_steps"],
        ),
        (
            {"bombus": {"trainer": {"lr_schedule": "linear", "total_steps": 5, "warmup_steps": 5}}},
            ["warmup_steps 5 leaves none of the total_steps 5"],
        ),
        ({"bombus": {"trainer": {"overlong": "penalty", "overlong_buffer": 5000}}}, ["overlong_buffer 5000", "4096"]),
        ({"bombus": {"trainer": {"enable_lora": True}}}, ["enable_lora needs a lora_rank of at least 1"]),
        ({"bombus": {"trainer": {"enable_lora": False, "lora_rank": 8}}}, ["enable_lora is false", "lora_rank is 8"]),
        ({"bombus": {"trainer": {"use_tis": "yes"}}}, ["bombus.trainer.use_tis", "true or false"]),
        ({"bombus": {"trainer": {"use_tis": True, "correction": "none"}}}, ["use_tis", "correction", "only one"]),
        ({"bombus": {"trainer": {"eps_clip": 2}}}, ["bombus.trainer.eps_clip = 2", "at most 1"]),
        ({"ajet": {"data": {"train_batch_size": {"a": 1}}}}, ["ajet.data.train_batch_size must be a plain value"]),
        (
            {"bombus": {"model": {"chat_template_kwargs": {"bos_token": "x"}}}},
            ["bombus.model.chat_template_kwargs", "bos_token is set by the renderer"],
        ),
        (
            {"bombus": {"model": {"chat_template_kwargs": {"a": None}}}},
            ["bombus.model.chat_template_kwargs", "it must be a mapping of up to 64 names to scalars"],
        ),
    ],
)
def test_a_mistake_is_named_with_its_value_and_its_range(job: Any, words: list[str]) -> None:
    why = refusal(job)
    assert all(word in why for word in words), why


@pytest.mark.parametrize(
    ("trainer", "why"),
    [
        ({"enable_lora": True}, "bombus.trainer: enable_lora needs a lora_rank of at least 1"),
        ({"overlong": "penalty"}, "bombus.trainer: `overlong: penalty` needs an overlong_buffer of at least 1 token"),
        (
            {"lora_rank": -1},
            "bombus.trainer.lora_rank = -1 is refused: it must be a whole number, at least 0, at most 1024",
        ),
        ({"lrr": 1}, "bombus.trainer.lrr is unknown; did you mean bombus.trainer.lr?"),
        ({"learning_rate": 1}, "bombus.trainer.learning_rate is unknown; did you mean bombus.trainer.lr?"),
        ({"lora_r": 1}, "bombus.trainer.lora_r is unknown; did you mean bombus.trainer.lora_rank?"),
        (
            {"max_tokens": 1},
            "bombus.trainer.max_tokens is unknown; did you mean bombus.rollout.max_response_length_in_one_turn?",
        ),
        (
            {"overlong": "penalty", "overlong_buffer": 5000},
            "bombus.trainer.overlong_buffer 5000 exceeds bombus.rollout.max_response_length_in_one_turn 4096",
        ),
    ],
)
def test_every_refusal_says_where_in_the_document_the_mistake_is(trainer: dict[str, Any], why: str) -> None:
    assert refusal({"bombus": {"trainer": trainer}}) == why


NO_MAPPING = (
    "{} must be a mapping: a job has `ajet:`, `bombus:` or xorl's keys such as `model_path:` at its top, "
    "a cluster file has `engines:`"
)
NO_REFERENCES = "anchors (&), aliases (*) and merge keys (<<) are not accepted: write the value out"
BROKEN = [
    ("a: [1, 2\n", ", line 2, column 1: expected ',' or ']', but got the end"),
    ("a: {b: 1\n  ]\n", ", line 2, column 3: expected ',' or '}', but got ']'"),
    ("a: 1\n  b: 2\n", ", line 2, column 4: mapping values are not allowed here"),
    ("a:\n  - 1\n b: 2\n", ", line 3, column 2: this line does not fit the indentation of those above it"),
    ("a: 1\nb: *c\n", f", line 2, column 4: {NO_REFERENCES}"),
    ("a: &c 1\n", f", line 1, column 4: {NO_REFERENCES}"),
    ("a: {<<: {b: 1}}\n", f", line 1, column 5: {NO_REFERENCES}"),
    ('{"a": 1,, "b": 2}', ", line 1, column 9: expected the node content, but found ','"),
    ("a: !!timestamp 2026-13-01\n", ": it cannot be read as YAML: month must be in 1..12"),
]


@pytest.mark.parametrize(("text", "why"), BROKEN)
def test_broken_yaml_is_refused_in_one_sentence_with_the_position(text: str, why: str, tmp_path: Path) -> None:
    assert refusal(text) == f"the job{why}"
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(Refused) as caught:
        read_job_file(path)
    assert caught.value.why == f"{path}{why}"


def test_a_missing_file_and_one_without_a_mapping_are_named(tmp_path: Path) -> None:
    def why(path: Path) -> str:
        with pytest.raises(Refused) as caught:
            read_job_file(path)
        return caught.value.why

    path = tmp_path / "job.yaml"
    assert why(path) == f"{path}: there is no such file"
    assert why(tmp_path) == f"{tmp_path}: it cannot be read: Is a directory"
    path.write_bytes(b"a: \xff")
    assert why(path) == f"{path}: it is not valid UTF-8 (at byte 3)"
    for text in ("", "- 1", "7"):
        path.write_text(text)
        assert why(path) == NO_MAPPING.format(path)
        assert refusal(text) == NO_MAPPING.format("the job")


def test_keys_that_a_job_adds_by_itself_are_not_listed_and_those_of_its_author_are() -> None:
    assert Job(model="tiny").run.ignored == ()
    for gpus in (2, 8):
        found = Job(model="tiny", n_gpu=gpus, logging="tensorboard", swarm_mode=True).run.ignored
        assert set(found) == {"ajet.trainer_common.n_gpus_per_node"}


def test_keys_without_effect_outside_agentjets_block_are_told_by_a_job_made_of_their_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {
        "ajet": {"model": {"path": "tiny"}, "trainer_common": {"nnodes": 2}},
        "actor_rollout_ref": {"actor": {"ppo_micro_batch_size_per_gpu": 4}},
        "custom_reward_function": {"path": "r.py"},
    }
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(tree))
    job = Job(base_yaml_config=path)
    assert sorted(job.run.ignored) == sorted(parse_job(tree).ignored)
    sent = parse_job(job.config.to_dict()).ignored
    assert sent == ("ajet.trainer_common.nnodes",)  # the server lists this one in its reply
    told = {record.getMessage() for record in caplog.records}
    assert told == {no_effect(key) for key in job.run.ignored if key not in sent}
    assert len(told) == 2


VERLS: dict[str, Any] = {
    "model": {"lora_rank": 32},
    "actor": {"optim": {"lr": 3e-5}, "ppo_micro_batch_size_per_gpu": 4},
}


@pytest.mark.parametrize("beside", [{"ajet": {"model": {"path": "tiny"}}}, {}])
def test_verls_keys_that_decide_what_is_trained_are_carried_out(beside: dict[str, Any], tmp_path: Path) -> None:
    tree = {**beside, "actor_rollout_ref": VERLS | {"rollout": {"n": 6}}}
    config = parse_job(tree)
    assert (config.trainer.lora_rank, config.trainer.lr, config.rollout.num_repeat) == (32, 3e-5, 6)
    assert config.ignored == ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",)
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(tree))
    job = Job(base_yaml_config=path, lr=1e-4)
    assert (job.run.trainer.lora_rank, job.run.trainer.lr) == (32, 1e-4)
    assert parse_job(job.config.to_dict()).trainer.lora_rank == 32


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({"ajet": {"lora": {"lora_rank": 8}}, "actor_rollout_ref": VERLS}, "is 32 and ajet.lora.lora_rank is 8"),
        ({"ajet": {"lora": {"lora_dropout": 0.1}}}, "ajet.lora.lora_dropout = 0.1 would affect training"),
        ({"ajet": {"trainer_common": {"optim": {"optimizer": "SGD"}}}}, "the optimizer is AdamW"),
        ({"ajet": {}, "algorithm": {"use_kl_in_reward": True}}, "algorithm.use_kl_in_reward = true is refused"),
        ({"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 16}}}, "give ajet.trainer_common.mini_batch_num"),
        ({"actor_rollout_ref": {"model": {"override_config": {"a": 1}}}}, "would affect training"),
    ],
)
def test_a_key_that_decides_what_is_trained_and_has_no_meaning_here_is_refused(tree: Any, why: str) -> None:
    assert why in refusal(tree)


def test_agentjets_defaults_change_nothing() -> None:
    optim = {"optimizer": "AdamW", "optimizer_impl": "torch.optim", "lr_warmup_steps_ratio": 0.0, "min_lr_ratio": 0.0}
    common = {"optim": optim | {"num_cycles": 0.5, "zero_indexed_step": True}, "loss_extra_scale_ratio": 1.0}
    rollout = {"top_p": 1.0, "top_k": -1, "gamma": 1.0, "val_kwargs": {"top_p": 1.0}}
    lora = {"layered_summon": False, "load_format": "auto"}
    assert (
        parse_job({"ajet": {"trainer_common": common, "rollout": rollout, "lora": lora}}).trainer
        == parse_job({}).trainer
    )


COMPARED = {"rollout": {"num_repeat": 1}}
ALONE = "compares the episodes of a task with each other"
DUMMIES = "rollout_until_finish_enough_non_dummy_tasks"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"bombus": COMPARED}, f"bombus.rollout.num_repeat = 1 is refused: adv_estimator grpo {ALONE}"),
        ({"ajet": COMPARED}, f"ajet.rollout.num_repeat = 1 is refused: adv_estimator grpo {ALONE}"),
        ({"bombus": {**COMPARED, "trainer": {"adv_estimator": "gpg", "backend": "verl"}}}, f"gpg {ALONE}"),
        (
            {
                "bombus": {
                    **COMPARED, "collection": {"method": DUMMIES}, "trainer": {"adv_estimator": "reinforce_plus_plus"},
                },
            },
            f"so {DUMMIES} never completes a batch: set it to 2 or more",
        ),
        ({"bombus": {"rollout": {"temperature": 0}}}, "bombus.rollout.temperature = 0.0 is refused: at temperature 0"),
        (
            {"bombus": {"trainer": {"correction": "token_mask", "tis_clip": 0.5}}},
            "bombus.trainer.tis_clip = 0.5 is refused: correction token_mask leaves out every token",
        ),
    ],
)  # fmt: skip
def test_settings_that_can_learn_nothing_together_are_refused(document: dict[str, object], words: str) -> None:
    with pytest.raises(Refused) as refused:
        parse_job(document)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "bombus",
    [
        {**COMPARED, "trainer": {"adv_estimator": "reinforce++"}},
        {**COMPARED, "trainer": {"kl_coef": 0.1}},
        {**COMPARED, "collection": {"method": "rollout_until_finish_enough_episodes"}},  # groups as large as they are
        {**COMPARED, "collection": {"rollout_groups": True}},
        {"rollout": {"temperature": 0, "sampling": "obey"}},
        {"trainer": {"correction": "token_mask", "tis_clip": 0}},
    ],
)
def test_settings_with_which_something_is_learnt_are_accepted(bombus: dict[str, object]) -> None:
    assert parse_job({"bombus": bombus}).ignored == ()


def test_a_job_that_was_accepted_before_it_could_be_known_to_learn_nothing_is_still_read_from_the_log() -> None:
    job = RunConfig.model_validate(COMPARED)
    assert RunConfig.from_json(job.to_json()) == job


def test_a_job_of_the_log_is_parsed_once() -> None:
    texts = [parse_job({}).to_json() for _ in range(2)]
    assert texts[0] is not texts[1]
    assert RunConfig.from_json(texts[0]) is RunConfig.from_json(texts[1])


def test_the_command_that_gives_an_engine_a_job_says_what_the_log_needs_of_it() -> None:
    job = parse_job({"bombus": {"model": {"path": "org/tiny"}, "collection": {"batch_size": 7}}})
    command = job.to_command("c", "main")
    assert (command.id, command.engine, command.model, command.config_digest) == ("c", "main", "org/tiny", job.digest)
    assert RunConfig.from_json(command.config) == job
    assert command.collection == Collection(batch_size=7, resume="auto")


def test_lengths_that_do_not_fit_are_refused() -> None:
    why = refusal(
        {"ajet": {"data": {"max_prompt_length": 10, "max_response_length": 10}, "rollout": {"max_model_len": 15}}}
    )
    assert "max_model_len 15" in why


_NUMBER = "a number has more than 64 characters"
_DEEP = "it is nested deeper than 32"
BOMBS = {
    "merge keys": (
        "\n".join(["- &a0 {k: 1}"] + [f"- &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 4)}]}}" for n in range(1, 12)]),
        f"line 1, column 3: {NO_REFERENCES}",
    ),
    "aliases": ("a: &a [" + "x," * 20_000 + "]\nb: [" + "*a," * 12_000 + "]", f"line 1, column 4: {NO_REFERENCES}"),
    "base 16": ("a: 0x" + "f" * 5000, f"line 1, column 4: {_NUMBER}"),
    "base 60": ("a: 1" + ":59" * 80_000, f"line 1, column 4: {_NUMBER}"),
    "a float of base 60": ("a: 1" + ":59" * 5000 + ".5", f"line 1, column 4: {_NUMBER}"),
    "brackets": ("a: " + "[" * 3000, f"line 1, column 36: {_DEEP}"),
    "dashes": ("- " * 3000, f"line 1, column 65: {_DEEP}"),
    "keys": (
        "".join(f"k{n}: 1\n" for n in range(25_000)),
        "line 2048, column 8: there are more than 4096 keys and values",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_short_yaml_that_would_take_long_is_refused_at_once(name: str) -> None:
    text, why = BOMBS[name]
    began = time.process_time()
    assert refusal(text) == f"the job, {why}"
    assert time.process_time() - began < 5


KWARGS = "bombus:\n  model:\n    path: tiny\n    chat_template_kwargs:\n      a: "


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (
            KWARGS + "!!timestamp 2026-11-28",
            "bombus.model.chat_template_kwargs.a is a date or a time; use a",
        ),
        (KWARGS + "!!binary aGk=", "bombus.model.chat_template_kwargs.a is of type bytes; use a string in quotes"),
        (KWARGS + "[1, !!set {b}]", "bombus.model.chat_template_kwargs.a[1] is of type set"),
        (
            KWARGS + "{!!binary aGk=: 1}",
            "bombus.model.chat_template_kwargs.a has a key of type bytes, but keys must be strings",
        ),
        (KWARGS + "{[b]: 1}", "unhashable"),
        ("!!binary aGk=: 1", "it has a key of type bytes, but keys must be strings: put it in quotes"),
        ("ajet:\n  !!binary aGk=: 1", "ajet has a key of type bytes"),
        (
            {"bombus": {"model": {"path": "tiny", "chat_template_kwargs": {"a": date(2026, 11, 28)}}}},
            "a is a date or a",
        ),
        ({"bombus": {"model": {b"path": "tiny"}}}, "bombus.model has a key of type bytes"),
        ({b"bombus": {}}, "it has a key of type bytes"),
        ({"ajet": {"a": {"b": (b"x",)}}}, "ajet.a.b[0] is of type bytes"),
    ],
)
def test_what_json_does_not_have_is_refused_where_it_stands(document: Any, why: str) -> None:
    assert why in refusal(document)


def test_a_date_is_a_text_as_it_is_written_and_numbers_are_texts_as_keys() -> None:
    config = parse_job(KWARGS + "2026-11-28\n      on: 2026-11-28T01:02:03Z\n      2: 3")
    assert config.model.chat_template_kwargs == {"a": "2026-11-28", "True": "2026-11-28T01:02:03Z", "2": 3}
    assert RunConfig.from_json(config.to_json()) == config


def test_an_oversized_job_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        parse_job("a: " + "x" * 300_000)
    assert caught.value.code == Code.TOO_LARGE


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"max_model_len": 600}, (300, 300, 300, 600)),
        ({"max_model_len": 9000}, (3000, 6000, 4096, 9000)),
        ({"max_prompt_length": 200}, (200, 15000, 4096, 15200)),
        ({"max_response_length": 100}, (3000, 100, 100, 3100)),
        ({"max_response_length_in_one_turn": 64}, (3000, 15000, 64, 18000)),
        ({"max_model_len": 512, "max_response_length": 128}, (384, 128, 128, 512)),
        ({"max_model_len": 512, "max_prompt_length": 128}, (128, 384, 384, 512)),
        ({"max_prompt_length": 1, "max_response_length": 2, "max_model_len": 9}, (1, 2, 2, 9)),
    ],
)
def test_the_lengths_that_are_not_given_follow_from_the_others(given: dict[str, int], wanted: tuple[int, ...]) -> None:
    assert tuple(derive_lengths(given).values()) == wanted


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "max_prompt_length": st.integers(1, 1000),
            "max_response_length_in_one_turn": st.integers(1, 1000),
            "max_model_len": st.integers(2000, 4000),
        },
    )
)
def test_lengths_that_can_fit_always_do(lengths: dict[str, int]) -> None:
    rollout = parse_job({"bombus": {"rollout": lengths}}).rollout
    assert all(getattr(rollout, name) == value for name, value in lengths.items())


def test_a_configuration_survives_json_and_yaml() -> None:
    config = parse_job(AGENTJET).model_copy(update={"ignored": ()})
    assert RunConfig.from_json(config.to_json()) == config
    assert parse_job(to_yaml(config.to_yaml_mapping())) == config
    assert yaml.safe_load(to_yaml(config.to_yaml_mapping())) == config.to_yaml_mapping()


def test_the_digest_ignores_keys_without_effect() -> None:
    assert parse_job(AGENTJET).digest == parse_job(AGENTJET + "something: else\n").digest
    assert parse_job(AGENTJET).digest != parse_job({}).digest
    assert len(parse_job({}).digest) == 32


def test_the_coordinators_rules_come_from_the_job() -> None:
    rules = parse_job(
        {"bombus": {"collection": {"batch_size": 3, "drain_s": 7}, "rollout": {"num_repeat": 5}}}
    ).to_collection()
    assert rules == Collection(batch_size=3, num_repeat=5, drain_s=7.0, resume="auto")
    assert parse_job({}).to_collection() == Collection(resume="auto")


@given(
    st.dictionaries(
        st.text(),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=("Cs", "Cc"))),
    )
)
def test_yaml_is_written_so_that_a_library_reads_it_back(tree: dict[str, Any]) -> None:
    written = {"a": tree, "empty": {}, "list": [1, 2.5, "x"]}
    assert yaml.safe_load(to_yaml(written)) == written


def test_json_needs_no_yaml_library_and_without_one_yaml_says_what_to_install() -> None:
    script = """
import json, sys
sys.modules["yaml"] = None  # as if it were not installed
from bombus.config.documents import parse_job
from bombus.errors import Refused
assert parse_job(json.dumps({"ajet": {"model": {"path": "tiny"}}})).model.path == "tiny"
try:
    parse_job("ajet: {model: {path: tiny}}")
except Refused as error:
    print(error.why)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'bombus[yaml]'" in done.stdout


def trainer(**options: object) -> TrainerConfig:
    return parse_job({"bombus": {"trainer": options}}).trainer


def test_a_wrong_estimator_is_one_mistake_and_not_two() -> None:
    assert "aggregation" not in refusal({"bombus": {"trainer": {"adv_estimator": "sgd"}}})


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"use_tis": True, "tis_clip": 3.0, "tis_clip_low": 0.1}, {"correction": "token_tis", "tis_clip_low": 0.1}),
        ({"use_tis": False}, {"correction": "none", "tis_clip": 2.0}),
        ({"use_tis": False, "tis_level": "sequence"}, {"correction": "none"}),
        ({"use_tis": True, "tis_level": None, "tis_mode": None}, {"correction": "token_tis", "tis_clip_low": 0.0}),
        ({"tis_level": "sequence"}, {"correction": "sequence_tis", "tis_clip": 2.0, "tis_clip_low": 0.0}),
        ({"tis_mode": "mask"}, {"correction": "token_mask", "tis_clip": 2.0, "tis_clip_low": 0.5}),
        (
            {"use_tis": True, "tis_level": "sequence", "tis_mode": "mask", "tis_upper_bound": 4.0},
            {"correction": "sequence_mask", "tis_clip": 4.0, "tis_clip_low": 0.25},
        ),
        ({"tis_mode": "mask", "tis_clip": 5.0, "tis_lower_bound": 0.1}, {"tis_clip": 5.0, "tis_clip_low": 0.1}),
        (
            {"tis_mode": "clip", "tis_upper_bound": 5.0, "tis_lower_bound": None},
            {"correction": "token_tis", "tis_clip_low": 0.2},
        ),
        # slime's own example gives truncation a lower bound and ignores it
        (
            {"use_tis": True, "tis_level": "token", "tis_mode": "truncate", "tis_lower_bound": 0.5},
            {"correction": "token_tis", "tis_clip_low": 0.0},
        ),
        ({"loss": "importance_sampling", "use_tis": True, "tis_clip": 3.0}, {"correction": "token_tis"}),
        ({"eps_clip": 0.1}, {"clip_low": 0.1, "clip_high": 0.1}),
        ({"eps_clip": 0.1, "eps_clip_high": 0.28}, {"clip_low": 0.1, "clip_high": 0.28}),
        ({"eps_clip": 0.1, "eps_clip_high": None}, {"clip_low": 0.1, "clip_high": 0.1}),
        ({"eps_clip_c": 3.0}, {"dual_clip": 3.0}),
        ({"advantage_estimator": "rloo"}, {"adv_estimator": "rloo", "loss": "clipped"}),
        ({"advantage_estimator": "gspo"}, {"adv_estimator": "grpo", "loss": "gspo"}),
        ({"kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}, {"kl_coef": 0.1, "kl_estimator": "k3"}),
        ({"kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl+"}, {"kl_estimator": "k3_unbiased"}),
        ({"kl_loss_coef": 0.1, "use_kl_loss": True}, {"kl_coef": 0.1}),
        ({"kl_loss_coef": 0.1, "use_kl_loss": False}, {"kl_coef": 0.0}),
        ({"kl_loss_coef": 0.1, "kl_coef": 0.0}, {"kl_coef": 0.1}),
        ({"kl_coef": 0, "eps_clip": 0.1}, {"kl_coef": 0.0}),
        ({"kl_coef": 0.1, "sample_packing_sequence_len": 500}, {"kl_coef": 0.1}),
        ({"entropy_coef": 0.01, "use_opsm": True, "opsm_delta": 0.5}, {"entropy_coef": 0.01, "opsm_delta": 0.5}),
        ({"calculate_per_token_loss": True}, {"loss_aggregation": "token"}),
        ({"disable_grpo_std_normalization": True}, {"normalise_by_std": False}),
    ],
)
def test_slimes_names_of_options_are_accepted(options: dict[str, object], wanted: dict[str, object]) -> None:
    found = trainer(**options)
    assert {name: getattr(found, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"kl_coef": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1},
            "slime's kl_coef subtracts the KL from the reward, which bombus does not do; give kl_loss_coef for a KL "
            "in the",
        ),
        ({"kl_coef": 0.05, "eps_clip": 0.2}, "is refused alongside slime's eps_clip"),
        ({"kl_coef": 0.05, "use_kl_loss": False}, "is refused alongside slime's use_kl_loss"),
        ({"tis_mode": "drop"}, "bombus.trainer.tis_mode = 'drop' is refused: it must be one of truncate, clip, mask"),
        ({"tis_level": "geometric"}, "tis_level = 'geometric' is refused: it must be one of token, sequence"),
        ({"tis_level": 3}, "tis_level = 3 is refused"),
        ({"tis_level": "token", "correction": "icepop"}, "correction and bombus.trainer.tis_level set the same thing"),
        ({"tis_mode": "mask", "tis_clip": 2, "tis_upper_bound": 2}, "tis_clip and bombus.trainer.tis_upper_bound set"),
        ({"tis_mode": "mask", "tis_upper_bound": "two"}, 'bombus.trainer.tis_upper_bound = "two" is refused'),
    ],
)
def test_options_that_slime_means_differently_are_refused(options: dict[str, object], words: str) -> None:
    assert words in refusal({"bombus": {"trainer": options}})


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"loss": "vanilla"}, {"loss": "clipped"}),
        ({"adv_estimator": "reinforce++"}, {"adv_estimator": "reinforce_plus_plus"}),
        ({"loss_aggregation": "token-mean"}, {"loss_aggregation": "token"}),
        ({"loss_aggregation": "seq-mean-token-mean"}, {"loss_aggregation": "episode"}),
        ({"loss_aggregation": "seq-mean-token-sum-norm"}, {"loss_aggregation": "constant"}),
        ({"loss_aggregation": "seq-mean-token-sum"}, {"loss_aggregation": "episode_sum"}),
        ({"loss_aggregation": "token-sum"}, {"loss_aggregation": "token_sum"}),
        ({"kl_estimator": "mse"}, {"kl_estimator": "k2"}),
    ],
)
def test_verls_names_of_algorithms_are_accepted(options: dict[str, object], wanted: dict[str, object]) -> None:
    found = trainer(**options)
    assert {name: getattr(found, name) for name in wanted} == wanted


def test_dr_grpo_brings_its_aggregation_unless_another_is_given() -> None:
    assert trainer(adv_estimator="dr-grpo").loss_aggregation == "constant"
    assert trainer(adv_estimator="dr_grpo", loss_aggregation="token").loss_aggregation == "token"
    assert trainer(adv_estimator="grpo").loss_aggregation == "episode"


@pytest.mark.parametrize(
    ("options", "low", "high"),
    [
        ({}, 0.2, 0.2),
        ({"loss": "gspo"}, 3e-4, 4e-4),
        ({"loss": "gspo", "clip_high": 0.01}, 3e-4, 0.01),
        ({"loss": "gspo", "eps_clip": 0.001}, 0.001, 0.001),
        ({"advantage_estimator": "gspo"}, 3e-4, 4e-4),
        ({"loss": "cispo"}, 1.0, 3.0),
        ({"loss": "cispo", "clip_low": 0.2}, 0.2, 3.0),
        ({"advantage_estimator": "cispo", "eps_clip_high": 5.0}, 1.0, 5.0),
        ({"loss": "importance_sampling"}, 0.2, 0.2),
        ({"backend": "verl", "loss": "gspo"}, 3e-4, 4e-4),
        ({"backend": "verl", "loss": "sapo"}, 0.2, 0.2),
    ],
)
def test_a_loss_brings_its_bounds_unless_others_are_given(options: dict[str, object], low: float, high: float) -> None:
    found = trainer(**options)
    assert (found.clip_low, found.clip_high) == (low, high)


def test_importance_sampling_brings_no_correction_unless_one_is_given() -> None:
    assert trainer(loss="importance_sampling").correction == "none"
    assert trainer(loss="importance_sampling", correction="sequence_tis").correction == "sequence_tis"
    assert trainer(loss="importance_sampling", tis_clip=0).correction == "none"
    assert trainer(loss="cispo").correction == "token_tis"
    for bounds in ({"tis_clip": 3.0}, {"tis_clip_low": 0.5}):
        why = refusal({"bombus": {"trainer": {"loss": "importance_sampling", **bounds}}})
        assert "the loss `importance_sampling` has none by default: set correction to token_tis too" in why


def test_settings_that_follow_from_a_loss_survive_storage() -> None:
    for loss in ("gspo", "importance_sampling"):
        config = parse_job({"bombus": {"trainer": {"loss": loss}}})
        assert RunConfig.from_json(config.to_json()) == config
        assert parse_job(to_yaml(config.to_yaml_mapping())) == config


def test_with_the_backend_verl_any_name_of_an_estimator_or_a_loss_is_accepted() -> None:
    found = trainer(backend="verl", adv_estimator="gpg", loss="sapo")
    assert (found.adv_estimator, found.loss) == ("gpg", "sapo")


@pytest.mark.parametrize(
    ("group", "before", "value", "now", "meant"),
    [
        ("rollout", "allow_biased_sampling", True, "sampling", "obey"),
        ("rollout", "allow_biased_sampling", False, "sampling", "refuse"),
        ("rollout", "side_calls", "train", "auxiliary_calls", "train"),
        ("collection", "scored_groups", True, "rollout_groups", True),
    ],
)
def test_a_job_of_a_log_with_a_field_that_has_another_name_now_is_read(
    group: str, before: str, value: object, now: str, meant: object
) -> None:
    tree = RunConfig().model_dump(mode="json")
    del tree[group][now]
    tree[group][before] = value
    assert getattr(getattr(RunConfig.from_json(json.dumps(tree)), group), now) == meant


@pytest.mark.parametrize(
    ("job", "meant"),
    [
        ({"collection": {"scored_groups": True}}, "bombus.collection.rollout_groups"),
        ({"rollout": {"side_calls": "train"}}, "bombus.rollout.auxiliary_calls"),
    ],
)
def test_a_field_that_has_another_name_now_is_refused_with_that(job: dict[str, Any], meant: str) -> None:
    with pytest.raises(Refused, match=f"is unknown; did you mean {meant}[?]"):
        parse_job({"bombus": job})


def test_a_configuration_of_an_earlier_version_trains_as_it_did() -> None:
    tree = json.loads(parse_job({}).to_json())
    fields = ("loss", "correction", "entropy_coef", "overlong", "use_opsm", "enable_lora")
    for field in fields:
        del tree["trainer"][field]
    found = RunConfig.from_json(json.dumps(tree)).trainer
    assert [getattr(found, field) for field in fields] == ["clipped", "token_tis", 0.0, "keep", False, None]


# ---- Job ------------------------------------------------------------------------------------------------------


def test_a_job_accepts_agentjets_keywords() -> None:
    job = Job(
        model="tiny",
        batch_size=4,
        num_repeat=2,
        lr=1e-3,
        lora_rank=8,
        n_gpu=2,
        swarm_mode_sample_collection_method="enough_tasks",
    )
    assert (job.run.model.path, job.run.collection.batch_size, job.run.trainer.lr) == ("tiny", 4, 1e-3)
    assert job.batch_size == 4  # type: ignore[attr-defined]
    ajet = job.config.to_dict()["ajet"]
    assert ajet["data"]["train_batch_size"] == 4
    assert ajet["trainer_common"]["n_gpus_per_node"] == 2
    assert ajet["backbone"] == "verl"
    assert ajet["rollout"]["max_model_len"] == 18000


def test_every_keyword_has_its_place_in_the_document() -> None:
    tree = Job().config.to_dict()["ajet"]
    for path in KEYWORDS.values():
        value: Any = tree
        for key in path.split("."):
            value = value[key]


def test_one_length_is_enough_for_a_job() -> None:
    job = Job(model="tiny", max_model_len=600)
    assert job.run.rollout.max_response_length == 300


def test_a_job_file_is_written_read_and_changed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "job.yaml"
    job = Job(model="tiny", lr=1e-6, bombus={"trainer": {"lr_schedule": "cosine", "total_steps": 10}})
    assert job.dump_job_as_yaml(str(path)) == str(path)
    assert yaml.safe_load(path.read_text()) == job.config.to_dict()
    again = Job.build_job_from_yaml(path)
    assert again.run == job.run
    changed = Job(base_yaml_config=path, lr=0.5, max_prompt_length=100)
    assert changed.run.trainer.lr == 0.5
    assert changed.run.trainer.lr_schedule == "cosine"
    assert changed.run.rollout.max_prompt_length == 100


def test_a_keyword_wins_over_a_files_own_block(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"bombus": {"trainer": {"lr": 0.1}, "rollout": {"max_model_len": 600}}}))
    assert Job(path, lr=0.2).run.trainer.lr == 0.2
    assert Job(path, lr=0.2, bombus={"trainer": {"lr": 0.3}}).run.trainer.lr == 0.3
    assert Job(path, max_model_len=1200).run.rollout.max_model_len == 1200


def test_a_missing_job_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"nothing\.yaml"):
        Job(tmp_path / "nothing.yaml")


def test_a_name_of_verls_registry_needs_the_verl_backend() -> None:
    with pytest.raises(Refused, match="with backend verl, any name that verl knows"):
        parse_job("bombus: {trainer: {loss: sapo}}")
    assert parse_job("bombus: {trainer: {loss: sapo, backend: verl}}").trainer.loss == "sapo"


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"model": "tiny", "batch_size": 4, "num_repeat": 8, "lr": 3e-3, "max_model_len": 2048},
        {"lora_rank": 8, "lora_alpha": 16, "gpu_memory_utilization": 0.5, "n_gpu": 4, "logging": "swanlab"},
        {"lr": 5e-5, "bombus": {"trainer": {"lr": 1e-4}, "collection": {"max_staleness": 1}}},
        {"max_prompt_length": 100, "max_response_length": 300},
    ],
    ids=["defaults", "lengths", "keys without effect", "own groups", "derived lengths"],
)
@pytest.mark.parametrize("base", ["", "ajet: {rollout: {temperature: 0.9}}\nbombus: {trainer: {loss: gspo}}\n"])
def test_the_document_that_a_job_sends_is_read_as_the_run_that_it_has(
    base: str, keywords: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(base)
    job = Job(base_yaml_config=file if base else None, **keywords)
    assert parse_job(job.config.to_dict()) == job.run


def test_verls_name_for_how_many_checkpoints_are_kept() -> None:
    def kept(number: int | None) -> int:
        return parse_job({"ajet": {"trainer_common": {"max_actor_ckpt_to_keep": number}}}).trainer.checkpoints_kept

    assert [kept(number) for number in (None, 1, 5)] == [2, 1, 5]


def test_agentjets_names_for_where_a_run_begins_and_how_often_it_is_saved() -> None:
    def trainer(**keys: object) -> tuple[str, int]:
        config = parse_job({"ajet": {"trainer_common": keys}})
        assert config.ignored == ()
        return config.trainer.resume, config.trainer.checkpoint_every

    assert trainer() == ("auto", 1)
    assert trainer(resume_mode="auto", save_freq=20) == ("auto", 20)
    assert trainer(resume_mode="disable", save_freq=-1) == ("never", 1)
    assert trainer(save_freq=500) == ("auto", 500)
    with pytest.raises(Refused, match=r"ajet\.trainer_common\.resume_mode"):
        trainer(resume_mode="resume_path")
