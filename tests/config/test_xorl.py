"""xorl's flat server configuration: what its keys become, and which are refused by name."""

from pathlib import Path
from typing import Any

import pytest

from bombus import Job
from bombus.config import xorl
from bombus.config.documents import parse_job
from bombus.config.job import RunConfig
from bombus.errors import Code, Refused

ROOT = Path(__file__).parents[2]
FLAT = {"model_path": "org/model"}


def test_the_example_trains_qwen3_8b_on_eight_gpus() -> None:
    config = parse_job((ROOT / "examples/server/qwen3_8b_full.yaml").read_text())
    assert (config.model.path, config.model.tokenizer, config.model.dtype) == ("Qwen/Qwen3-8B", "", "bfloat16")
    assert (config.trainer.backend, config.trainer.processes) == ("verl", 8)
    assert (config.trainer.gradient_checkpointing, config.trainer.lora_rank) == (True, 0)
    assert (config.collection.batch_size, config.rollout.num_repeat) == (32, 8)
    assert (config.trainer.ulysses_parallel_size, config.trainer.attn_implementation) == (1, "auto")
    assert "output_dir" in config.ignored
    assert {"init_device", "ckpt_manager"}.isdisjoint(config.ignored)
    assert RunConfig.from_json(config.to_json()).digest == config.digest


def test_the_length_that_samples_are_packed_to_is_read() -> None:
    config = parse_job({**FLAT, "sample_packing_sequence_len": 12_345})
    group, _, field = xorl.MAPPED["sample_packing_sequence_len"].partition(".")
    assert getattr(getattr(config, group), field) == 12_345


def test_lora_settings_count_only_where_lora_is_enabled() -> None:
    targets = ["q_proj", "v_proj"]
    given = {**FLAT, "lora_rank": 8, "lora_alpha": 32, "lora_target_modules": targets}
    on = parse_job({**given, "enable_lora": True}).trainer
    assert (on.lora_rank, on.lora_alpha, on.target_modules) == (8, 32, "q_proj,v_proj")
    assert parse_job({**given, "enable_lora": False}).trainer.lora_rank == 0
    assert parse_job({**FLAT, "enable_lora": True}).trainer.lora_rank == xorl.LORA_RANK_DEFAULT


def test_a_tokenizer_from_elsewhere_and_full_precision_are_read() -> None:
    config = parse_job({**FLAT, "tokenizer_path": "org/other", "enable_mixed_precision": False, "seed": 7})
    assert (config.model.tokenizer, config.model.dtype, config.model.seed) == ("org/other", "float32", 7)


def test_the_sdks_job_reads_flat_keys_and_its_keywords_win() -> None:
    file = ROOT / "examples/server/qwen3_8b_full.yaml"
    assert Job(file).run.digest == parse_job(file.read_text()).digest
    changed = Job(file, model="tiny", lr=0.5).run
    assert (changed.model.path, changed.trainer.lr, changed.trainer.processes) == ("tiny", 0.5, 8)


def test_processes_that_share_sequences_are_counted_as_xorl_counts_them() -> None:
    trainer = parse_job({**FLAT, "data_parallel_shard_size": 4, "ulysses_parallel_size": 2}).trainer
    assert (trainer.backend, trainer.processes, trainer.ulysses_parallel_size) == ("verl", 8, 2)
    alone = parse_job({**FLAT, "ulysses_parallel_size": 2, "cp_fsdp_mode": "ulysses_only"}).trainer
    assert (alone.backend, alone.processes, alone.ulysses_parallel_size) == ("verl", 2, 2)


def test_what_computes_attention_is_read() -> None:
    for name in ("eager", "sdpa", "native"):
        assert parse_job({**FLAT, "attn_implementation": name}).trainer.attn_implementation == name
    assert parse_job({**FLAT, "attn_implementation": None}).trainer.attn_implementation == "auto"
    many = {"data_parallel_shard_size": 2, "attn_implementation": "flash_attention_3"}
    assert parse_job({**FLAT, **many}).trainer.attn_implementation == "flash_attention_3"


@pytest.mark.parametrize("device", [None, "meta", "cpu", "cuda"])
def test_one_process_makes_its_weights_on_any_device(device: str | None) -> None:
    assert parse_job({**FLAT, "init_device": device}).digest == parse_job(FLAT).digest


def test_our_own_block_wins_over_flat_keys() -> None:
    assert parse_job({**FLAT, "bombus": {"model": {"path": "tiny"}}}).model.path == "tiny"


@pytest.mark.parametrize("key", sorted(xorl.LIMITED))
def test_values_that_change_nothing_are_accepted_and_others_are_refused_by_name(key: str) -> None:
    for value in xorl.LIMITED[key].values:
        parse_job({**FLAT, key: value})
    assert refusal({**FLAT, key: "something else"}).startswith(f'{key} = "something else" is refused: ')


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"ulysses_parallel_size": 0}, "ulysses_parallel_size = 0 is refused: it must be a whole number, at least 1"),
        ({"ulysses_parallel_size": True}, "ulysses_parallel_size = true is refused: it must be a whole number"),
        ({"ulysses_parallel_size": -2}, "ulysses_parallel_size = -2 is refused: it must be a whole number"),
        ({"ringattn_parallel_size": 2}, "keys and values from process to process; set ulysses_parallel_size, which"),
        ({"pipeline_parallel_size": 2}, "which would need a model in stages, a schedule of micro-batches between them"),
        ({"expert_parallel_size": 2}, "which would need an exchange of tokens between the processes in each layer"),
        ({"init_device": "npu"}, 'init_device = "npu" is refused: it must be one of meta, cpu, cuda'),
        (
            {"init_device": "cuda", "data_parallel_shard_size": 2},
            "init_device = cuda is refused with several processes: each would hold all weights on its GPU",
        ),
        ({"init_device": "cuda", "ulysses_parallel_size": 2}, "init_device = cuda is refused with several processes"),
        ({"ckpt_manager": "torch"}, 'ckpt_manager = "torch" is refused: checkpoints are torch\'s distributed'),
        ({"cp_fsdp_mode": "ring_only"}, "weights are sharded over all processes, including those that share"),
        ({"attn_implementation": "clever"}, "it must be one of auto, eager, sdpa, native, flash_attention_2,"),
        ({"attn_implementation": "flash_attention_3"}, "with backend torch, where it would need flash-attn kernels"),
        (
            {"attn_implementation": "flash_attention_4", "ulysses_parallel_size": 2},
            "with ulysses_parallel_size 2, where it would need an exchange of heads around flash-attn: set it to auto",
        ),
        ({"expert_parallel_size": 8}, "expert_parallel_size = 8 is refused: no backend splits experts"),
        ({"expert_parallel_size": True}, "expert_parallel_size = true is refused"),
        ({"ulyses_parallel_size": 1}, "ulyses_parallel_size is unknown; did you mean ulysses_parallel_size?"),
        (
            {"model": "tiny", "batch_size": 4},  # the keywords of a program's `Job`
            "model is unknown; did you mean model_path? Settings of bombus itself are in groups, such as bombus: {",
        ),
        ({"flux_capacitor": 1}, "flux_capacitor is unknown; docs/configuration.md lists the keys"),
        ({"engines": {}}, "engines is unknown: it belongs in a cluster file, which is for `bombus up --config`"),
        ({"data_parallel_mode": "ddp"}, 'data_parallel_mode = "ddp" is refused: it must be one of fsdp2, none'),
        ({"data_parallel_mode": "none", "data_parallel_shard_size": 2}, "data_parallel_mode = none has one process"),
        ({"data_parallel_shard_size": "many"}, 'data_parallel_shard_size = "many" is refused: it must be a whole'),
        ({"enable_lora": True, "lora_rank": 0}, "lora_rank = 0 is refused if enable_lora is true: it must be a whole"),
        ({"enable_lora": "yes"}, 'enable_lora = "yes" is refused: it must be true or false'),
        ({"enable_lora": True, "lora_target_modules": "all"}, 'lora_target_modules = "all" is refused: it must be a'),
        ({"sample_packing_sequence_len": 0}, "sample_packing_sequence_len = 0 is refused: it must be a whole number"),
        ({"model_name": "org/third"}, 'model_name = "org/third" is refused: it must be the same as model_path'),
        ({"load_checkpoint_path": "/data/000100"}, "to start from other weights, name them as model_path"),
    ],
)
def test_a_refusal_names_the_key(keys: dict[str, Any], why: str) -> None:
    assert why in refusal({**FLAT, **keys})


def test_beside_agentjets_block_flat_keys_have_no_effect() -> None:
    config = parse_job({"ajet": {}, "ulysses_parallel_size": 8})
    assert config.ignored == ("ulysses_parallel_size",)


def test_flat_keys_without_a_model_are_refused() -> None:
    assert "model_path is missing" in refusal({"data_parallel_mode": "fsdp2"})


def refusal(job: dict[str, Any]) -> str:
    with pytest.raises(Refused) as caught:
        parse_job(job)
    assert caught.value.code == Code.BAD_CONFIG
    return caught.value.why
