"""The base class for the groups of settings in a configuration, and the wording of errors."""

import difflib
import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from bombus.errors import Code, Refused

Tree = dict[str, Any]  # a document: nested mappings, lists and scalars


def _number(value: object) -> object:
    """Convert text to a float if possible: YAML 1.1 reads `1e-6` as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Float = Annotated[float, BeforeValidator(_number)]
Beta = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]


class ConfigGroup(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def allowed(field: FieldInfo) -> str:
    """Return a clause on the values that a field accepts, such as `it must be a number, at least 0, at most 1`."""
    signs = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    bounds = [
        f"{word} {getattr(bound, sign)}"
        for bound in field.metadata
        for sign, word in signs.items()
        if getattr(bound, sign, None) is not None
    ]
    if field.description and not bounds:
        return f"it must be {field.description}"
    kind = without_none(field.annotation)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return "it must be one of " + ", ".join(kind)
    choices = getattr(kind, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return "it must be one of " + ", ".join(choices)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    word = words.get(cast(type, kind), "two numbers from 0 to below 1")
    return ", ".join([f"it must be {word}", *bounds])


def without_none(kind: Any) -> Any:
    """Return X for `X | None`, and any other type unchanged."""
    kinds = getattr(kind, "__args__", ())
    return next(one for one in kinds if one is not NoneType) if NoneType in kinds else kind


def bad_config(why: str) -> Refused:
    return Refused(Code.BAD_CONFIG, why)


def shown(value: object) -> str:
    """Return a value as quoted in error messages, in at most 80 characters."""
    if isinstance(value, Mapping):
        return "a mapping"
    text = json.dumps(value, default=str) if not isinstance(value, list) else f"a list of {len(value)}"
    return text if len(text) <= 80 else text[:77] + "..."


# Our name for a setting, and the names that other projects use for it (peft, transformers, TRL, verl, OpenAI).
MEANT: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate", "learningrate", "step_size", "actor_lr"),
    "lora_rank": ("lora_r", "r", "rank", "lora_dim"),
    "lora_alpha": ("alpha",),
    "target_modules": ("lora_target_modules", "lora_targets"),
    "warmup_steps": ("num_warmup_steps", "lr_warmup_steps"),
    "total_steps": ("max_steps", "num_train_steps", "total_training_steps"),
    "grad_clip": ("max_grad_norm", "clip_grad", "gradient_clipping", "max_norm"),
    "kl_coef": ("beta", "kl_beta", "kl_loss_coef", "init_kl_coef"),
    "clip_high": ("epsilon_high", "clip_ratio_high", "eps_clip_high"),
    "clip_low": ("epsilon", "epsilon_low", "clip_ratio", "clip_ratio_low", "eps_clip", "cliprange"),
    "entropy_coef": ("entropy_coeff", "entropy_bonus"),
    "ppo_epochs": ("num_epochs", "epochs", "num_iterations", "num_ppo_epochs"),
    "adv_estimator": ("algorithm", "advantage_estimator", "advantage"),
    "loss": ("loss_type", "policy_loss", "loss_fn", "loss_mode"),
    "max_tokens_per_bin": ("micro_batch_size", "per_device_train_batch_size", "max_tokens_per_gpu"),
    "checkpoint_every": ("save_steps", "save_freq", "save_interval", "save_every"),
    "checkpoints_kept": ("save_total_limit", "max_to_keep"),
    "num_repeat": ("num_generations", "group_size", "rollout_n", "n", "n_samples_per_prompt", "samples_per_prompt"),
    "max_response_length_in_one_turn": ("max_tokens", "max_new_tokens", "max_completion_tokens"),
    "max_response_length": ("max_completion_length", "response_length"),
    "max_prompt_length": ("prompt_length", "max_input_length"),
    "max_model_len": ("max_seq_length", "max_seq_len", "max_length", "context_length", "seq_len"),
    "batch_size": ("train_batch_size", "global_batch_size", "rollout_batch_size", "prompts_per_step"),
    "path": ("model", "name", "model_name", "model_path", "model_name_or_path", "base_model"),
    "dtype": ("torch_dtype", "precision", "bf16", "fp16"),
    "rollout_groups": ("scored_groups",),
    "auxiliary_calls": ("side_calls",),
    "gradient_checkpointing": ("enable_gradient_checkpointing", "activation_checkpointing"),
}


def nearest(name: str, paths: Iterable[str]) -> str | None:
    """Return the setting among `paths` that an unknown name most likely means, by `MEANT` or else by spelling, or None.

    If several settings match by `MEANT`, return the one with the most similar spelling.
    """
    known = list(paths)
    last = name.rpartition(".")[2].lower().replace("-", "_")
    meant = {here for here, names in MEANT.items() if last in names}
    by_meaning = [path for path in known if path.rpartition(".")[2] in meant]
    close = difflib.get_close_matches(name, by_meaning, n=1, cutoff=0.0) or difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None
