"""Reads AgentJet's keys below `ajet:`, and verl's own next to them: what each key means here, and which are refused.

A key that affects training is applied or refused; any other key is listed as having no effect.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from bombus.config.groups import Tree, bad_config, shown
from bombus.config.job import Tracker
from bombus.config.xorl import Only

# AgentJet's keys below `ajet.`, with our name for the same setting.
AJET_KEYS: dict[str, str] = {
    "project_name": "experiment.project_name",
    "experiment_name": "experiment.experiment_name",
    "experiment_dir": "experiment.dir",
    "model.path": "model.path",
    "data.train_batch_size": "collection.batch_size",
    "data.max_prompt_length": "rollout.max_prompt_length",
    "data.max_response_length": "rollout.max_response_length",
    "rollout.num_repeat": "rollout.num_repeat",
    "rollout.max_env_worker": "rollout.max_env_worker",
    "rollout.max_response_length_in_one_turn": "rollout.max_response_length_in_one_turn",
    "rollout.max_model_len": "rollout.max_model_len",
    "rollout.temperature": "rollout.temperature",
    "rollout.ppo_max_token_len_per_gpu": "trainer.max_tokens_per_bin",
    "swarm_mode_sample_collection_method": "collection.method",
    "swarm_mode_sample_collection_max_cached_episodes": "collection.max_cached_episodes",
    "trainer_common.algorithm.adv_estimator": "trainer.adv_estimator",
    "trainer_common.logger": "logging.trackers",
    "trainer_common.resume_mode": "trainer.resume",
    "trainer_common.save_freq": "trainer.checkpoint_every",
    "trainer_common.max_actor_ckpt_to_keep": "trainer.checkpoints_kept",
    "trainer_common.mini_batch_num": "trainer.mini_batch_num",
    "trainer_common.ppo_epochs": "trainer.ppo_epochs",
    "trainer_common.kl_loss_coef": "trainer.kl_coef",
    "trainer_common.kl_loss_type": "trainer.kl_estimator",
    "trainer_common.optim.lr": "trainer.lr",
    "trainer_common.optim.weight_decay": "trainer.weight_decay",
    "trainer_common.optim.betas": "trainer.betas",
    "trainer_common.optim.grad_clip": "trainer.grad_clip",
    "trainer_common.optim.lr_scheduler_type": "trainer.lr_schedule",
    "trainer_common.optim.lr_warmup_steps": "trainer.warmup_steps",
    "trainer_common.optim.total_training_steps": "trainer.total_steps",
    "trainer_common.optim.min_lr_ratio": "trainer.min_lr_ratio",
    "lora.lora_rank": "trainer.lora_rank",
    "lora.lora_alpha": "trainer.lora_alpha",
    "lora.target_modules": "trainer.target_modules",
}
_OPTIM = "actor_rollout_ref.actor.optim"
# verl's own keys, which may be used next to `ajet:` or instead of it.
VERL_KEYS: dict[str, str] = {
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.tokenizer_path": "model.tokenizer",
    "actor_rollout_ref.model.lora_rank": "trainer.lora_rank",
    "actor_rollout_ref.model.lora_alpha": "trainer.lora_alpha",
    "actor_rollout_ref.model.target_modules": "trainer.target_modules",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.gradient_checkpointing",
    "actor_rollout_ref.actor.ppo_epochs": "trainer.ppo_epochs",
    "actor_rollout_ref.actor.override_ppo_mini_batch_num": "trainer.mini_batch_num",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.max_tokens_per_bin",
    "actor_rollout_ref.actor.kl_loss_coef": "trainer.kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": "trainer.kl_estimator",
    "actor_rollout_ref.actor.entropy_coeff": "trainer.entropy_coef",
    "actor_rollout_ref.actor.clip_ratio_low": "trainer.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "trainer.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "trainer.dual_clip",
    "actor_rollout_ref.actor.loss_agg_mode": "trainer.loss_aggregation",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "trainer.loss",
    "actor_rollout_ref.actor.grad_clip": "trainer.grad_clip",
    f"{_OPTIM}.lr": "trainer.lr",
    f"{_OPTIM}.weight_decay": "trainer.weight_decay",
    f"{_OPTIM}.betas": "trainer.betas",
    f"{_OPTIM}.clip_grad": "trainer.grad_clip",
    f"{_OPTIM}.grad_clip": "trainer.grad_clip",
    f"{_OPTIM}.lr_scheduler_type": "trainer.lr_schedule",
    f"{_OPTIM}.lr_warmup_steps": "trainer.warmup_steps",
    f"{_OPTIM}.total_training_steps": "trainer.total_steps",
    f"{_OPTIM}.min_lr_ratio": "trainer.min_lr_ratio",
    "actor_rollout_ref.rollout.n": "rollout.num_repeat",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.max_model_len": "rollout.max_model_len",
    "algorithm.adv_estimator": "trainer.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo": "trainer.normalise_by_std",
    "data.train_batch_size": "collection.batch_size",
    "data.max_prompt_length": "rollout.max_prompt_length",
    "data.max_response_length": "rollout.max_response_length",
    "trainer.project_name": "experiment.project_name",
    "trainer.experiment_name": "experiment.experiment_name",
    "trainer.logger": "logging.trackers",
    "trainer.save_freq": "trainer.checkpoint_every",
    "trainer.resume_mode": "trainer.resume",
    "trainer.max_actor_ckpt_to_keep": "trainer.checkpoints_kept",
}
KEYS = {**{f"ajet.{key}": ours for key, ours in AJET_KEYS.items()}, **VERL_KEYS}

KL_SWITCHES = ("ajet.trainer_common.use_kl_loss", "actor_rollout_ref.actor.use_kl_loss")  # off: kl_loss_coef is ignored
_NOT_IN_REWARD = Only((False,), "rewards are used as reported; kl_loss_coef adds the divergence to the loss")
_ADAMW = Only(("AdamW", "adamw"), "the optimizer is AdamW")
_TORCH = Only(("torch.optim",), "the optimizer is torch's AdamW")
_IN_STEPS = Only((0, 0.0), "give lr_warmup_steps, a number of steps")
_ONE_CYCLE = Only((0.5,), "a cosine schedule decays only once")
# Keys that are accepted only with values that change nothing here.
LIMITED: dict[str, Only] = {
    "ajet.rollout.gamma": Only((1, 1.0), "the rewards of an episode's calls are not discounted"),
    "ajet.rollout.top_p": Only((1, 1.0), "training episodes are sampled from the whole distribution"),
    "ajet.rollout.top_k": Only((-1, 0), "training episodes are sampled from the whole distribution"),
    "ajet.trainer_common.loss_extra_scale_ratio": Only((1, 1.0), "set the learning rate"),
    "ajet.trainer_common.algorithm.use_kl_in_reward": _NOT_IN_REWARD,
    "ajet.trainer_common.use_kl_in_reward": _NOT_IN_REWARD,
    "algorithm.use_kl_in_reward": _NOT_IN_REWARD,
    "algorithm.gamma": Only((1, 1.0), "the rewards of an episode's calls are not discounted"),
    "actor_rollout_ref.rollout.top_p": Only((1, 1.0), "training episodes are sampled from the whole distribution"),
    "actor_rollout_ref.rollout.top_k": Only((-1, 0), "training episodes are sampled from the whole distribution"),
    "actor_rollout_ref.actor.loss_extra_scale_ratio": Only((1, 1.0), "set the learning rate"),
    **{
        f"{optim}.{key}": only
        for optim in ("ajet.trainer_common.optim", _OPTIM)
        for key, only in (
            ("optimizer", _ADAMW),
            ("optimizer_impl", _TORCH),
            ("lr_warmup_steps_ratio", _IN_STEPS),
            ("num_cycles", _ONE_CYCLE),
            ("zero_indexed_step", Only((True,), "steps are numbered from 0")),
        )
    },
}
# Any other key with one of these prefixes affects training and is refused, except for the keys in HARMLESS.
DECIDES = (
    "ajet.lora.",
    "ajet.model.",
    "ajet.trainer_common.optim.",
    "ajet.trainer_common.algorithm.",
    "actor_rollout_ref.model.",
    "actor_rollout_ref.actor.",
    "algorithm.",
)
HARMLESS = {
    *("load_format", "layered_summon", "external_lib", "trust_remote_code", "use_shm", "use_liger", "hybrid_engine"),
    *("use_fused_kernels", "fused_kernel_options", "use_remove_padding", "enable_activation_offload", "strategy"),
    *("use_dynamic_bsz", "use_torch_compile", "fsdp_config", "megatron", "ulysses_sequence_parallel_size", "_target_"),
    *(
        "ppo_micro_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "entropy_from_logits_with_chunking",
        "use_prefix_grouper",
    ),
    *("entropy_checkpointing", "checkpoint", "profiler", "shuffle", "data_loader_seed", "rollout_n"),
    *("lam", "kl_ctrl", "kl_penalty"),  # for critics and for a KL term in the reward; both are refused by other keys
}
_INSTEAD = {
    "clip_ratio": "give clip_ratio_low and clip_ratio_high",
    "ppo_mini_batch_size": "give ajet.trainer_common.mini_batch_num, the number of optimizer steps per batch",
}
IGNORED: dict[str, str] = {
    "ajet.trainer_common.n_gpus_per_node": "in the cluster file, `devices` of the trainer and of inference set which "
    "GPUs they have, and `processes` and `count` how many processes and replicas there are",
    "ajet.trainer_common.nnodes": "the cluster file sets which processes run on which machine",
    "ajet.rollout.gpu_memory_utilization": "`bombus inference --help` has the flags of a replica's memory",
}
# The keys that `Job` adds for readers that expect all of AgentJet's keys. `EXPECTED` has the values that are not
# reported as having no effect, and `PASSED_ON` the values that `Job` adds if the author gives none.
EXPECTED: dict[str, tuple[object, ...]] = {
    "ajet.enable_swarm_mode": (True,),
    "ajet.backbone": ("verl", "torch"),
    "ajet.lora.load_format": ("auto",),
}
PASSED_ON: dict[str, object] = {
    "trainer_common.logger": None,
    "trainer_common.n_gpus_per_node": None,
    "enable_swarm_mode": True,
    "backbone": "verl",
    "lora.load_format": "auto",
    "rollout.gpu_memory_utilization": None,
}
VERL_TOPS = ("actor_rollout_ref", "algorithm", "data", "trainer")
_TOPS = ("ajet", *VERL_TOPS)
_MINUS_ONE_IS_UNSET = {"trainer.warmup_steps", "trainer.total_steps", "trainer.checkpoint_every"}
_LOGGERS_OF_OTHERS = {"console"}  # what they print; `bombus overwatch` shows more
_RESUME_MODES = {"disable": "never"}  # AgentJet's and verl's names -> ours


def has_keys(tree: Mapping[str, object]) -> bool:
    """Return whether a document uses AgentJet's or verl's keys."""
    return "ajet" in tree or "actor_rollout_ref" in tree


def read(tree: Mapping[str, object]) -> tuple[Tree, dict[str, str], list[str]]:
    """Read a document's keys. Return the settings in our groups, the document's key for each of our paths, and the keys
    without effect.

    Raises `Refused(BAD_CONFIG)` with the name of the key.
    """
    given: Tree = {}
    names: dict[str, str] = {}
    ignored: list[str] = []
    agentjets = "ajet" in tree
    kl_is_on = agentjets  # on by default in AgentJet, off by default in verl
    for path, value in _leaves({top: tree[top] for top in _TOPS if top in tree} if has_keys(tree) else {}):
        target = KEYS.get(path)
        if path in KL_SWITCHES:
            kl_is_on = kl_is_on and value is not False if agentjets else value is True
        elif target is None:
            _check_harmless(path, value)
            if value is not None and path not in LIMITED and value not in EXPECTED.get(path, ()):
                ignored.append(path)
        elif value is not None and not (target in _MINUS_ONE_IS_UNSET and value == -1):
            group, _, field = target.partition(".")
            if field == "trackers" and not set(_words(value)) <= {*Tracker, *_LOGGERS_OF_OTHERS}:
                ignored.append(path)
            fields = given.setdefault(group, {})
            fields[field] = _agreed(fields.get(field), _as_ours(field, value), names.get(target, path), path)
            names[target] = path
    trainer = given.get("trainer", {})
    if not kl_is_on:
        trainer.pop("kl_coef", None)
    if trainer.get("min_lr_ratio") == 0 and trainer.get("lr_schedule", "constant") == "constant":
        del trainer["min_lr_ratio"]  # AgentJet's default, which has no effect with a constant schedule
    return given, names, ignored


def _check_harmless(path: str, value: object) -> None:
    """Raise `Refused` for a key or value that affects training but has no equivalent here."""
    if path in LIMITED:
        if value is not None and value not in LIMITED[path].values:
            raise bad_config(f"{path} = {shown(value)} is refused: {LIMITED[path].why}")
    elif path.startswith(DECIDES) and value not in (None, False, "", [], {}):
        leaf = next((part for part in path.split(".")[2:] or path.split(".")[1:] if part in HARMLESS), None)
        if leaf is None:
            todo = _INSTEAD.get(path.rpartition(".")[2], "leave it out, or use a setting below bombus.trainer")
            raise bad_config(f"{path} = {shown(value)} would affect training, but has no equivalent here: {todo}")


def _agreed(before: object, value: object, name: str, path: str) -> object:
    if before not in (None, value):
        raise bad_config(f"{name} is {shown(before)} and {path} is {shown(value)}: leave one of them out")
    return value


def _as_ours(field: str, value: object) -> object:
    if field == "resume" and isinstance(value, str):
        return _RESUME_MODES.get(value, value)
    if field == "target_modules" and isinstance(value, list):
        return ",".join(map(str, value))
    if field == "trackers":
        return [name for name in _words(value) if name in set(Tracker)]
    return value


def _words(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _leaves(tree: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield keys as dotted paths, with their values. A subtree without any known key is yielded as one leaf."""
    known = [*KEYS, *KL_SWITCHES, *LIMITED]
    inner = {".".join(key.split(".")[:depth]) for key in known for depth in range(1, key.count(".") + 1)}
    todo: list[tuple[str, Mapping[Any, object]]] = [("", tree)]
    while todo:
        stem, branch = todo.pop()
        for key, value in branch.items():
            path = f"{stem}{key}"
            if path in inner and isinstance(value, Mapping):
                todo.append((f"{path}.", value))
            elif path in inner and value is not None:
                raise bad_config(f"{path} must be a mapping, not {shown(value)}")
            elif path not in _TOPS:
                yield path, value
