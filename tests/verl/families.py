"""What a rank finds about tiny models of several families: what their versions hold, and what LoRA adapts of them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from bombus.architectures.miniatures import write_miniature
from bombus.errors import EngineFault
from bombus.weights.deltas import FULL_FILE, file_sha256
from bombus.weights.models import load_model, persistent_buffers
from bombus_trainer.backend import TrainerBackend
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.backends.verl.executor import VerlExecutor
from bombus_trainer.publish.export import ModelPart, VersionTarget, export, export_base
from bombus_trainer.ranks import Ranks
from bombus_trainer.settings import TrainerSettings
from tests.trainer.small_batches import tiny_settings
from tests.verl.given import facts, groups
from tests.verl.processes import on_ranks

Found = dict[str, object]
WITH_BUFFERS = ("apertus", "deepseek_v3", "glm4_moe", "minimax_m2")
WITH_EXPERTS = "deepseek_v3"
WITH_TOWER = "gemma3"
ADAPTER: dict[str, object] = {"lora_rank": 2, "target_modules": "o_proj"}
REFUSED = {"all layers": "all-linear", "experts": "o_proj,gate_proj,up_proj,down_proj", "unknown": "o_proj,w9"}


def compute(folder: Path, ranks: Ranks) -> Found:
    models = {family: miniature(family, folder / family, ranks) for family in (*WITH_BUFFERS, WITH_TOWER)}
    return {
        "versions": {family: versions(models[family], folder / family, ranks) for family in WITH_BUFFERS},
        "restarted": restarted(models[WITH_EXPERTS], folder / "restarted", ranks),
        "refused": {name: refusals(models[WITH_EXPERTS], targets, ranks) for name, targets in REFUSED.items()},
        "adapted": {family: adapted(models[family], ranks) for family in ("apertus", WITH_TOWER)},
    }


def miniature(
    family: str, folder: Path, ranks: Ranks, seed: int = 0, fields: Mapping[str, object] | None = None
) -> Path:
    """Write a tiny model of a family, with these fields of its configuration, and return where it is."""
    if ranks.leads:
        write_miniature(AutoConfig.for_model(family, **(fields or {})), folder / "given", seed)
    ranks.agree(True)  # no rank goes on before it is there
    return folder / "given"


def verl_of(model: Path, settings: TrainerSettings, ranks: Ranks) -> VerlExecutor:
    return VerlExecutor(model, settings, ranks, files_of(model))


def files_of(model: Path) -> dict[str, bytes]:
    return {"config.json": (model / "config.json").read_bytes()}


def written(backend: VerlExecutor, folder: Path, ranks: Ranks, part: ModelPart = ModelPart.MODEL) -> Path:
    """Return where the leader has written a version, or the model below its adapters. All ranks take part."""
    if not ranks.leads:
        backend.gather_weights(part)
        return folder
    base = part == ModelPart.BASE
    return Path((export_base(backend, folder, 1) if base else export(backend, VersionTarget(folder, 0, 1))).where)


def changed(given: Path, version: Path, ranks: Ranks) -> list[str]:
    """Return the tensors that a replica of the version has with other values than the given model. Raises for less."""
    if not ranks.leads:
        return []
    before, after = (load_model(folder).state_dict() for folder in (given, version))
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


def versions(given: Path, folder: Path, ranks: Ranks) -> Found:
    """Return what is changed in versions of a model: at first, after a step, and in what adapters apply to."""
    found: Found = {"buffers": sorted(persistent_buffers(load_model(given)))}
    for way, changes in {"all weights": {}, "an adapter": ADAPTER}.items():
        backend = verl_of(given, tiny_settings(**changes), ranks)
        found[way] = changed(given, written(backend, folder / way / "0", ranks), ranks)
        backend.train_step(groups(1), 1)
        found[f"{way}, after a step"] = changed(given, written(backend, folder / way / "1", ranks), ranks)
    found["below the adapter"] = changed(given, written(backend, folder / "base", ranks, ModelPart.BASE), ranks)
    return found | half_precision(given, folder / "half", ranks)


def half_precision(given: Path, folder: Path, ranks: Ranks) -> Found:
    """Return each tensor's precision in a bfloat16 version by both backends, and the digests of their files."""
    settings = tiny_settings(model={"dtype": "bfloat16"})
    files = [written(verl_of(given, settings, ranks), folder / "verl", ranks) / FULL_FILE]
    if not ranks.leads:
        return {}
    torch_backend = Executor(given, settings, files_of(given))
    files.append(Path(export(torch_backend, VersionTarget(folder / "torch", 0, 1)).where) / FULL_FILE)
    return {
        "dtypes": [{name: str(value.dtype) for name, value in load_file(file).items()} for file in files],
        "sha256": [file_sha256(file) for file in files],
    }


def restarted(given: Path, folder: Path, ranks: Ranks) -> list[str]:
    """Return what a checkpoint of a model does not put back into an engine with other weights and buffers."""
    saved = verl_of(given, tiny_settings(), ranks).save(folder / "checkpoints", facts(1))
    other = verl_of(miniature(WITH_EXPERTS, folder / "other", ranks, seed=1), tiny_settings(), ranks)
    other.restore(saved.path, saved.digest)
    return changed(given, written(other, folder / "version", ranks), ranks)


def refusals(given: Path, targets: str, ranks: Ranks) -> list[str]:
    """Return with which sentences verl's engine and ours refuse to adapt layers; "" where they do not."""
    settings = tiny_settings(lora_rank=2, target_modules=targets)
    said = []
    for load in (partial(verl_of, ranks=ranks), lambda model, settings: Executor(model, settings, files_of(model))):
        try:
            load(given, settings)
            said.append("")
        except EngineFault as fault:
            said.append(str(fault))
    return said


def adapted(given: Path, ranks: Ranks) -> list[list[str]]:
    """Return the names of the tensors of an adapter on all linear layers, by verl's engine and by ours."""
    settings = tiny_settings(lora_rank=2)
    backends: list[TrainerBackend] = [verl_of(given, settings, ranks), Executor(given, settings, files_of(given))]
    return [sorted(backend.outline(ModelPart.ADAPTER).shapes) for backend in backends]


if __name__ == "__main__":
    on_ranks(compute)
