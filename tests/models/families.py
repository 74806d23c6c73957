"""A tiny random model of each family that transformers has a causal language model for, as bombus computes it."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bombus.architectures.miniatures import miniature
from bombus.errors import EngineFault
from bombus_inference.backends.torch.backend import check_model as check_served
from bombus_inference.backends.torch.backend import load_policy
from bombus_inference.backends.torch.checking import disagreement
from bombus_inference.settings import ComputeSettings
from bombus_trainer.backends.torch.model import PolicyModel
from bombus_trainer.loading import check_model as check_trained
from bombus_trainer.settings import TrainerSettings

TOKENS = 200  # the longest sequence: far more than the windows of the tiny models
BLOCK_TOKENS = 4
NOT_TRIED = "cannot be tried in a small size"

# Where a family's default configuration lacks what its models are known for.
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy", "topk_group": 1, "n_group": 1, "num_experts_per_tok": 2},
    "gemma3_text": {"final_logit_softcapping": 5.0},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "granitemoe": {"logits_scaling": 3.0},
    "phi3": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "starcoder2": {"sliding_window": 16},
}


@dataclass(frozen=True)
class Found:
    """What became of a family: the worst differences in nats, or the sentences that refuse it."""

    family: str
    engine: float | None = None
    trainer: float | None = None
    refusals: tuple[str, ...] = ()


def families() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_model(family: str) -> PreTrainedModel:
    """Make a family's tiny model. Raises `EngineFault` where transformers cannot make one from so few numbers."""
    try:
        config: PretrainedConfig = AutoConfig.for_model(family, **FIELDS.get(family, {}))
    except Exception as error:  # some families have no default configuration that their own code accepts
        raise EngineFault(f"{family} {NOT_TRIED}: {error}") from error
    return miniature(config)


def measure(family: str) -> Found:
    """Compare engine and trainer with transformers on a family's tiny model, or note how they refuse it."""
    try:
        model = small_model(family)
    except EngineFault as fault:
        return Found(family, refusals=(str(fault),))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model.save_pretrained(folder)
        refusals = tuple(refusal(check, folder) for check in (check_served, check_trained))
        if any(refusals):
            return Found(family, refusals=refusals)
        served = disagreement(load_policy(folder, ComputeSettings()), BLOCK_TOKENS, TOKENS)
        trained = PolicyModel.load(folder, TrainerSettings()).disagreement(TOKENS)
        return Found(family, served.worst, trained.worst)


def refusal(check: Callable[[Path, int], None], folder: Path) -> str:
    """Return the sentence with which a check refuses a model; empty if it does not."""
    try:
        check(folder, TOKENS)
    except EngineFault as fault:
        return str(fault)
    return ""
