"""A tiny random model of each family that transformers has a causal language model for, as bombus computes it."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bombus.architectures.miniatures import empty_model, write_miniature
from bombus.config.job import RunConfig
from bombus.errors import EngineFault
from bombus.host.doctor import State
from bombus.host.doctor_model import examine_model
from bombus_inference.backends.torch.backend import check_model as check_served
from bombus_inference.backends.torch.backend import load_policy
from bombus_inference.backends.torch.checking import disagreement
from bombus_inference.settings import ComputeSettings
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.backends.torch.model import PolicyModel
from bombus_trainer.loading import check_model as check_trained
from bombus_trainer.publish.export import VersionTarget, export
from bombus_trainer.settings import TrainerSettings

TOKENS = 200  # the longest sequence: far more than the windows of the tiny models
BLOCK_TOKENS = 4

QWEN4_EXP = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}

# Where a family's default configuration lacks what its models are known for.
FIELDS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5}},
    "deepseek_v2": {"topk_method": "greedy", "topk_group": 1, "n_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "gemma3_text": {"final_logit_softcapping": 5.0},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "granitemoe": {"logits_scaling": 3.0},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv"] * 2},
    "ministral": {"head_dim": 128, "layer_types": ["full_attention", *["sliding_attention"] * 3] * 8},
    "nemotron": {"num_key_value_heads": 8},
    "phi3": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen4_exp": {"text_config": QWEN4_EXP},
    "qwen4_exp_text": QWEN4_EXP,
    "reformer": {"is_decoder": True},
    "starcoder2": {"sliding_window": 16},
}


@dataclass(frozen=True)
class Found:
    """What became of a family: the worst differences in nats, or the sentences that refuse it ("": it is not refused).

    `doctor_served` and `doctor_trained` are what `bombus doctor --model` says about engine and trainer beforehand, from
    the full configuration alone. `untried` is its sentence where it cannot say it.
    """

    family: str
    engine: float | None = None
    trainer: float | None = None
    served: str = ""
    trained: str = ""
    doctor_served: str = ""
    doctor_trained: str = ""
    untried: str = ""

    @property
    def refusals(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.served, self.trained, self.doctor_served, self.doctor_trained)))


def families() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def full_config(family: str, **fields: Any) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model(family, **{**FIELDS.get(family, {}), **fields})
    return config


def measure(family: str, **fields: Any) -> Found:
    """Compare engine and trainer with transformers on a family's tiny model, or note how they refuse it.

    `fields` are of its configuration.
    """
    config = full_config(family, **fields)
    with tempfile.TemporaryDirectory() as place:
        named, small = Path(place) / "named", Path(place) / "small"
        config.save_pretrained(named)
        write_small(config, named, small)
        served, trained = (refusal(check, small) for check in (check_served, check_trained))
        found = Found(family, served=served, trained=trained, **diagnosis(named))
        if found.refusals:
            return found
        engine = disagreement(load_policy(small, ComputeSettings()), BLOCK_TOKENS, TOKENS)
        trainer = PolicyModel.load(small, TrainerSettings()).disagreement(TOKENS)
        return replace(found, engine=engine.worst, trainer=trainer.worst)


def tensors_lost_by_export(family: str, **changes: Any) -> list[str]:
    """Return the tensors of a family's tiny model that version 0 of a run with these `changes` of its trainer lacks.

    A tensor with other values counts as lost.
    """
    settings = TrainerSettings.of_job(RunConfig.model_validate({"trainer": changes}))
    with tempfile.TemporaryDirectory() as place:
        small = Path(place) / "small"
        write_miniature(full_config(family), small)
        executor = Executor(small, settings, {"config.json": (small / "config.json").read_bytes()})
        published = export(executor, VersionTarget(Path(place) / "weights", 0, 1)).where
        given, served = (load_policy(folder, ComputeSettings()).state_dict() for folder in (small, Path(published)))
        return [name for name, value in given.items() if not torch.equal(value, served[name])]


def write_small(config: PretrainedConfig, named: Path, small: Path) -> None:
    """Write a family's tiny model; where transformers makes none of any size, its configuration and some file."""
    try:
        write_miniature(config, small)
    except EngineFault:
        with pytest.raises(EngineFault):
            empty_model(config)
        shutil.copytree(named, small, dirs_exist_ok=True)
        save_file({"nothing": torch.zeros(1)}, small / "model.safetensors", metadata={"format": "pt"})


def refusal(check: Callable[[Path, int], None], folder: Path) -> str:
    """Return the sentence with which a check refuses a model; empty if it does not."""
    try:
        check(folder, TOKENS)
    except EngineFault as fault:
        return str(fault)
    return ""


def diagnosis(folder: Path) -> dict[str, Any]:
    """Return what the doctor says about the configuration in `folder`, by the names of `Found`.

    The folder has no tokenizer, so its chat template is left out.
    """
    said: dict[str, str] = {}
    for finding in examine_model(str(folder)):
        about = finding.what.rpartition(": ")[2]
        if about == "chat template":
            continue
        if finding.state == State.OPTIONAL:
            said["untried"] = finding.detail
        elif finding.state == State.MISSING:
            both = ("doctor_served", "doctor_trained")
            for name in (f"doctor_{about}",) if about in ("served", "trained") else both:
                said.setdefault(name, finding.detail)
    return said
