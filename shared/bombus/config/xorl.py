"""Reads xorl's flat server configuration as a job: what each of its keys means here, and which values are refused."""

import difflib
from collections.abc import Mapping
from typing import TypeGuard

import msgspec

from bombus.config.groups import Tree, bad_config, shown

LORA_RANK_DEFAULT = 32  # xorl's own default if LoRA is enabled without a rank


class Only(msgspec.Struct, frozen=True):
    """A key that is accepted only with values that change nothing here."""

    values: tuple[object, ...]
    why: str


# xorl's key -> our path, for keys whose value is used unchanged.
MAPPED: dict[str, str] = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    "seed": "model.seed",
    "enable_gradient_checkpointing": "trainer.gradient_checkpointing",
    "sample_packing_sequence_len": "trainer.max_tokens_per_bin",
    "enable_packing": "trainer.enable_packing",
    "lora_alpha": "trainer.lora_alpha",
    "attn_implementation": "trainer.attn_implementation",
}

# xorl's key -> the settings that it becomes.
READ: dict[str, str] = {
    "enable_mixed_precision": "true: `model.dtype: bfloat16`; false: `float32`",
    "enable_lora": "false: `trainer.enable_lora: false` with `lora_rank: 0`; true: the rank that `lora_rank` gives",
    "lora_rank": f"`trainer.lora_rank` if `enable_lora` is true; {LORA_RANK_DEFAULT} if it is not given",
    "lora_target_modules": "`trainer.target_modules`, a list of names",
    "data_parallel_mode": "`fsdp2`, or `none` with one process",
    "data_parallel_shard_size": "`trainer.processes`, times `ulysses_parallel_size`; above 1 also `backend: verl`",
    "ulysses_parallel_size": "`trainer.ulysses_parallel_size`; above 1 also `backend: verl`",
    "init_device": "`meta` or `cpu`: a trainer's first process reads the weights, and the others have empty ones until "
    "they get their parts (all read them if embeddings and output layer are one matrix); `cuda`: only one process",
}

_OWN = "each backend chooses its own"
_PLACE = "the log determines where a run continues"
_WORKERS = "services connect through the bus"
# Accepted but without effect: these concern speed, logging, or a process layout that bombus does not have.
IGNORED: dict[str, str] = {
    "moe_implementation": _OWN,
    "ce_mode": _OWN,
    "merge_qkv": _OWN,
    "router_fp32": _OWN,
    "lm_head_fp32": _OWN,
    "rmsnorm_mode": _OWN,
    "activation_native": _OWN,
    "rope_native": _OWN,
    "attention_cast_bf16": _OWN,
    "load_weights_mode": "one process reads the weights",
    "enable_full_shard": "fsdp2 shards everything",
    "reshard_after_forward": "fsdp2's own default applies",
    "enable_forward_prefetch": "fsdp2's own default applies",
    "enable_reentrant": "gradient checkpointing is never reentrant",
    "enable_compile": _OWN,
    "compile_dynamic_shapes": _OWN,
    "pipeline_parallel_schedule": "layers are not split over processes",
    "pp_variable_seq_lengths": "layers are not split over processes",
    "ep_dispatch": "experts are not split over processes",
    "output_dir": "`--data-dir` of `bombus up`, or `--folder` of a trainer, sets the folder of checkpoints, where "
    "export, status and replay look for them",
    "skip_initial_checkpoint": _PLACE,
    "storage_limit": "two checkpoints and two versions of the weights are kept",
    "idle_session_timeout": "episodes have their own timeout, `discard_episode_timeout`",
    "enable_self_test": "`bombus doctor --config` checks this before the start",
    "log_level": "`--log-level` of each command",
    "log_gradient_norms": "a step's metrics include it",
    "log_router_stats": "no backend has a router",
    "freeze_router": "no backend trains a router",
    "worker_bind_host": _WORKERS,
    "worker_bind_port": _WORKERS,
    "worker_bind_address": _WORKERS,
    "engine_connect_host": _WORKERS,
    "worker_connection_timeout": _WORKERS,
    "worker_max_retries": _WORKERS,
    "sync_inference_method": "`bombus inference --backend` decides this",
}

# What each refused kind of parallelism would need, and what to use instead.
_INSTEAD = "data_parallel_shard_size shards every weight over more processes"
_SHORTER = "lower max_tokens_per_bin, or set enable_gradient_checkpointing"
_STAGES = (
    "which would need a model in stages, a schedule of micro-batches between them, and checkpoints and exports that "
    f"join them; {_INSTEAD}"
)
_EXPERTS = (
    "which would need an exchange of tokens between the processes in each layer, and an export that joins their "
    f"experts; {_INSTEAD}"
)
_MATRICES = f"which would need a plan of how each family's matrices are cut; {_INSTEAD}"
_RING = (
    "which would need an attention that passes keys and values from process to process; set ulysses_parallel_size, "
    f"which has processes exchange heads instead, or {_SHORTER}"
)
_EMPTY = (None, "")
LIMITED: dict[str, Only] = {
    "data_parallel_replicate_size": Only(
        (1,), "the verl backend shards over all of its processes; raise the shard size"
    ),
    "expert_parallel_size": Only((1,), f"no backend splits experts over processes, {_EXPERTS}"),
    "pipeline_parallel_size": Only((1,), f"no backend splits layers over processes, {_STAGES}"),
    "pipeline_parallel_virtual_stages": Only((1,), f"no backend splits layers over processes, {_STAGES}"),
    "tensor_parallel_size": Only((1,), f"no backend splits matrices over processes, {_MATRICES}"),
    "lm_head_tensor_parallel_size": Only((1,), f"no backend splits matrices over processes, {_MATRICES}"),
    "ringattn_parallel_size": Only((1,), f"no backend passes sequences around in a ring, {_RING}"),
    "cp_fsdp_mode": Only(
        (None, "all", "ulysses_only"), "weights are sharded over all processes, including those that share a sequence"
    ),
    "enable_activation_offload": Only((False,), "activations stay on the device; use enable_gradient_checkpointing"),
    "enable_fp8_training": Only((False,), "weights are trained in float32"),
    "enable_qarl": Only((False,), "weights are trained in float32"),
    "enable_qlora": Only((False,), "the base under LoRA is not quantized; leave it out for plain LoRA"),
    "moe_hybrid_shared_lora": Only((False,), "no backend puts LoRA on experts"),
    "lora_b_init_std": Only((0, 0.0), "a new adapter leaves the model unchanged"),
    "merge_lora_interval": Only((0,), "adapters are merged at export, never in training"),
    "optimizer": Only(("adamw",), "adamw is the only optimizer"),
    "optimizer_dtype": Only(("fp32",), "the optimizer's moments are kept in float32"),
    "ckpt_manager": Only(
        (None, "dcp"),
        "checkpoints are torch's distributed checkpoints (dcp) with backend verl, and single safetensors files with "
        "backend torch; set it to dcp for either, or leave it out",
    ),
    "load_checkpoint_path": Only(_EMPTY, f"{_PLACE}; to start from other weights, name them as model_path"),
    "train_serve_profile": Only(_EMPTY, "set its keys one by one"),
    "foundation": Only((None, {}), "models are text only"),
    "encoders": Only((None, {}), "models are text only"),
}
# Accepted only with the same value as the other key.
SAME_AS = {"model_name": "model_path", "config_path": "model_path"}

KEYS = (*MAPPED, *READ, *SAME_AS, *LIMITED, *IGNORED)
Given = dict[str, object]  # our path -> value


def read(flat: Mapping[str, object]) -> tuple[Given, dict[str, str], list[str]]:
    """Read flat keys. Return the values keyed by our own paths, the flat key behind each, and the keys without effect.

    Raises `Refused(BAD_CONFIG)` with the name of the key.
    """
    given: Given = {}
    names: dict[str, str] = {}
    if not flat:
        return given, names, []
    for key, value in flat.items():
        if key not in KEYS:
            raise bad_config(f"{key} is unknown" + _hint(key))
        if key in LIMITED and not _is_one_of(value, LIMITED[key].values):
            raise bad_config(f"{key} = {shown(value)} is refused: {LIMITED[key].why}")
        if key in SAME_AS and value not in (None, flat.get(SAME_AS[key])):
            raise bad_config(f"{key} = {shown(value)} is refused: it must be the same as {SAME_AS[key]}")
        if key in MAPPED and value is not None:
            given[MAPPED[key]], names[MAPPED[key]] = value, key
    if given.get("model.tokenizer") == given.get("model.path"):
        given.pop("model.tokenizer", None)
    processes = _processes(flat)
    _check_init_device(flat, alone="trainer.backend" not in processes)
    for found in (_precision(flat), _lora(flat), processes):
        for path, (value, key) in found.items():
            given[path], names[path] = value, key
    return given, names, [key for key in flat if key in IGNORED]


_Derived = dict[str, tuple[object, str]]  # our path -> value, and the key that set it


def _precision(flat: Mapping[str, object]) -> _Derived:
    key = "enable_mixed_precision"
    mixed = _flag(flat, key)
    return {} if mixed is None else {"model.dtype": ("bfloat16" if mixed else "float32", key)}


def _lora(flat: Mapping[str, object]) -> _Derived:
    if not _flag(flat, "enable_lora"):
        return {"trainer.lora_rank": (0, "lora_rank"), "trainer.enable_lora": (False, "enable_lora")}
    rank = flat.get("lora_rank", LORA_RANK_DEFAULT)
    if rank == 0:
        raise bad_config("lora_rank = 0 is refused if enable_lora is true: it must be a whole number, at least 1")
    found: _Derived = {"trainer.lora_rank": (rank, "lora_rank")}
    targets = flat.get("lora_target_modules")
    if targets is not None:
        if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
            raise bad_config(f"lora_target_modules = {shown(targets)} is refused: it must be a list of names")
        found["trainer.target_modules"] = (",".join(targets), "lora_target_modules")
    return found


def _processes(flat: Mapping[str, object]) -> _Derived:
    mode = flat.get("data_parallel_mode", "fsdp2")
    size, ulysses = flat.get("data_parallel_shard_size", 1), flat.get("ulysses_parallel_size", 1)
    if mode not in ("fsdp2", "none"):
        raise bad_config(f"data_parallel_mode = {shown(mode)} is refused: it must be one of fsdp2, none")
    if mode == "none" and (size, ulysses) != (1, 1):
        raise bad_config(
            "data_parallel_mode = none has one process: set data_parallel_shard_size and ulysses_parallel_size to 1, "
            "or the mode to fsdp2"
        )
    many = size * ulysses if _is_whole(size) and _is_whole(ulysses) else size
    found: _Derived = {
        "trainer.processes": (many, "data_parallel_shard_size"),
        "trainer.ulysses_parallel_size": (ulysses, "ulysses_parallel_size"),
    }
    if (size, ulysses) != (1, 1):
        found["trainer.backend"] = ("verl", "data_parallel_shard_size" if size != 1 else "ulysses_parallel_size")
    return found


def _check_init_device(flat: Mapping[str, object], alone: bool) -> None:
    """Raise `Refused` for a device on which weights cannot be initialised. `alone` means that there is only one
    process."""
    key = "init_device"
    device = flat.get(key)
    if device not in (None, "meta", "cpu", "cuda"):
        raise bad_config(f"{key} = {shown(device)} is refused: it must be one of meta, cpu, cuda")
    if device == "cuda" and not alone:
        raise bad_config(
            f"{key} = cuda is refused with several processes: each would hold all weights on its GPU before it gets "
            "its part; set it to meta, so that one process reads them and sends the others their parts"
        )


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _flag(flat: Mapping[str, object], key: str) -> bool | None:
    value = flat.get(key)
    if value is not None and not isinstance(value, bool):
        raise bad_config(f"{key} = {shown(value)} is refused: it must be true or false")
    return value


def _is_one_of(value: object, values: tuple[object, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def _hint(key: str) -> str:
    if key in ("engines", "gateway", "coordinator", "hive", "nats", "data_dir"):
        return ": it belongs in a cluster file, which is for `bombus up --config`"
    close = difflib.get_close_matches(key, (*KEYS, "ajet", "bombus"), n=1)
    hint = f"; did you mean {close[0]}?" if close else "; docs/configuration.md lists the keys."
    return (
        f"{hint} Settings of bombus itself are in groups, such as bombus: "
        f"{{model: {{path: tiny}}, trainer: {{lr: 0.003}}}}"
    )


def put(given: Mapping[str, object], tree: Tree) -> None:
    """Put each value into the group that its path names."""
    for path, value in given.items():
        group, _, field = path.partition(".")
        tree.setdefault(group, {})[field] = value
