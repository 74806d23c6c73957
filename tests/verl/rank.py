"""What a rank finds about a tiny model: the steps of each case with both backends, restarts, names and refusals."""

from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from transformers import Gemma2Config, Gemma2ForCausalLM

from bombus.architectures.canary import canary_logprobs, sum_of_bits
from bombus.config.job import RunConfig
from bombus.errors import EngineFault
from bombus.weights.canary import IN_FLOAT64, Expected
from bombus.weights.canary import compare as check_canary
from bombus.weights.deltas import FULL_FILE, file_sha256
from bombus.weights.merging import merge_files
from bombus.weights.models import load_model
from bombus_trainer.backend import OperationBackend, TrainerBackend
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.backends.verl.executor import VerlExecutor
from bombus_trainer.data.batch import EpisodeGroup
from bombus_trainer.operations.settings import ExecutorSettings
from bombus_trainer.publish.export import ModelPart, VersionTarget, export, export_adapter, export_base
from bombus_trainer.rank_leader import Board, Leader, follow
from bombus_trainer.ranks import Ranks
from bombus_trainer.settings import TrainerSettings
from tests.trainer.small_batches import VOCAB, tiny_settings, tiny_tokenizer
from tests.verl.given import CASES, PACKED, STEPS, facts, groups, model_folder, settings
from tests.verl.processes import EXCHANGE_S, on_ranks

Found = dict[str, object]
SHARES = ("importance_capped", "masked_share", "clip_fraction")
CANARIES: dict[str, dict[str, object]] = {
    "all weights": {},
    "half precision": {"model": {"dtype": "bfloat16"}},
    "an adapter": {"lora_rank": 4, "lora_alpha": 8},
}
KEPT = ("loss", "grad_norm", "entropy", "kl_sampler", "tokens_trained", "sequences", "lr", "updates", *SHARES)


def compute(folder: Path, ranks: Ranks) -> Found:
    model = model_folder(folder)
    found: Found = {case: compare(model, case, ranks, folder / case) for case in CASES}
    found["lora"] = lora(model, ranks, folder / "lora")
    found["canary"] = {way: canary(model, way, ranks, folder / "canary" / way) for way in CANARIES}
    found["restart"] = restart(model, ranks, folder / "restart")
    found["algorithms"] = algorithms(model, ranks)
    found["few"] = few(model, ranks)
    found["work"] = work(model, ranks)
    found["soft-capped"] = soft_capped(folder / "soft-capped", ranks)
    return found


def exported(backend: TrainerBackend, ranks: Ranks, folder: Path, version: int) -> Found:
    """Return the digest of the weights and where they are, on the leader; the others take part in writing them."""
    if isinstance(backend, VerlExecutor) and not ranks.leads:
        backend.gather_weights()
        return {}
    weights = export(backend, VersionTarget(folder, version, 1))
    return {"sha256": weights.sha256, "where": weights.where}


def steps(backend: TrainerBackend, ranks: Ranks, folder: Path, first: int = 1) -> list[Found]:
    """Return the steps' metrics and the digest of the weights after each, beginning with that before the first."""
    made: list[Found] = [exported(backend, ranks, folder, 0)]
    for step in range(first, first + STEPS):
        metrics = backend.train_step(groups(step), step)
        made.append({name: metrics[name] for name in KEPT} | exported(backend, ranks, folder, step))
    return made


class VerlSettings(TrainerSettings):
    """Settings that take verl's functions of these names, also where we have our own of the same name."""

    estimator_name: str = ""
    loss_name: str = ""

    @property
    def verl_adv_estimator(self) -> str:
        return self.estimator_name

    @property
    def verl_policy_loss(self) -> str:
        return self.loss_name


def verl_settings(**changes: object) -> TrainerSettings:
    """Make settings for the tiny model. `estimator_name` and `loss_name` are verl's, the others our own."""
    names = {name: changes.pop(name) for name in ("estimator_name", "loss_name") if name in changes}
    return VerlSettings.model_validate({**dict(tiny_settings(**changes)), **names})


def compare(model: Path, case: str, ranks: Ranks, folder: Path) -> Found:
    chosen = settings(case)
    verl = steps(VerlExecutor(model, chosen, ranks, packed=case in PACKED), ranks, folder / "verl")
    return {"verl": verl, "torch": steps(Executor(model, chosen), ranks, folder / "torch") if ranks.leads else None}


def lora(model: Path, ranks: Ranks, folder: Path) -> Found:
    """Train an adapter, which adds nothing before its first step. That has the gradient of any adapter on the model."""
    chosen = tiny_settings(lora_rank=4, lora_alpha=8, kl_coef=0.1)
    backend = VerlExecutor(model, chosen, ranks)
    return {"verl": steps(backend, ranks, folder), "merged_sha256": merged_adapter(backend, ranks, folder / "adapter")}


def merged_adapter(backend: VerlExecutor, ranks: Ranks, folder: Path) -> str:
    """Return the digest of what a replica makes of the published adapter, on the leader."""
    if not ranks.leads:
        for part in (ModelPart.BASE, ModelPart.ADAPTER):
            backend.gather_weights(part)
        return ""
    base = export_base(backend, folder, 1)
    adapter = export_adapter(backend, VersionTarget(folder, STEPS, 1), base)
    merge_files(Path(base.where), Path(adapter.where), folder / "merged")
    return file_sha256(folder / "merged" / FULL_FILE)


def canary(model: Path, way: str, ranks: Ranks, folder: Path) -> Found:
    """Return how far a replica of what the leader publishes is from its canary, and what a step changes in that."""
    chosen = tiny_settings(**CANARIES[way])
    board = Board(dist.distributed_c10d._get_default_store(), ranks)
    if not ranks.leads:
        follow(board, lambda job: VerlExecutor(model, chosen, ranks), no_operations)
        return {}
    leader = Leader(board, lambda job: VerlExecutor(model, chosen, ranks), no_operations, EXCHANGE_S)
    backend, part = leader.load(chosen.job), ModelPart.ADAPTER if chosen.config.lora_rank else ModelPart.MODEL
    before = backend.canary(part)
    backend.train_step(groups(1), 1)
    after, where = backend.canary(part), export(backend, VersionTarget(folder, 1, 1)).where
    leader.stop()
    assert before is not None
    assert after is not None
    replica = load_model(Path(where))
    bits = sum_of_bits(replica.named_parameters())
    check = check_canary(Expected(1, after, before), canary_logprobs(replica), IN_FLOAT64, bits)
    assert check is not None
    changed = max(abs(one - other) for one, other in zip(before.logprobs, after.logprobs))
    return {"difference": check.difference, "changed": changed, **msgspec.to_builtins(after)}


def no_operations(job: RunConfig, executor: ExecutorSettings) -> OperationBackend:
    raise EngineFault("no operations here")


def restart(model: Path, ranks: Ranks, folder: Path) -> Found:
    """Make two steps; and make one, a checkpoint, and the other step with a new engine."""
    chosen = tiny_settings(weight_decay=0.1)
    found: Found = {}
    straight = VerlExecutor(model, chosen, ranks)
    straight.train_step(groups(1), 1)
    saved = straight.save(folder / "checkpoints", facts(1))
    found["straight"] = straight.train_step(groups(2), 2)
    found["straight_sha256"] = exported(straight, ranks, folder / "straight", 2).get("sha256")
    again = VerlExecutor(model, chosen, ranks)
    again.restore(saved.path, saved.digest)
    found["again"] = again.train_step(groups(2), 2)
    found["again_sha256"] = exported(again, ranks, folder / "again", 2).get("sha256")
    found["saved"] = [str(saved.path), saved.digest]
    return found


def algorithms(model: Path, ranks: Ranks) -> Found:
    """Make the first step under names of verl's registries, and return the refusals of names that cannot be used."""
    found: Found = {}
    ours = VerlExecutor(model, tiny_settings(), ranks).train_step(groups(1), 1)
    found["ours"] = [ours["loss"], ours["grad_norm"]]
    chosen: dict[str, dict[str, object]] = {
        "vanilla": {"loss_name": "vanilla"},
        "vanilla, entropy": {"loss_name": "vanilla", **CASES["an entropy bonus"]},
        "sapo": {"loss_name": "sapo"},
        "gspo": {**CASES["gspo"], "loss_name": "gspo"},
        "grpo": {"estimator_name": "grpo"},
        "reinforce_plus_plus": {"estimator_name": "reinforce_plus_plus"},
        "unknown loss": {"loss_name": "clever"},
        "unknown estimator": {"estimator_name": "clever"},
        "critic": {"estimator_name": "gae"},
    }
    for name, changes in chosen.items():
        try:
            metrics = VerlExecutor(model, verl_settings(**changes), ranks).train_step(groups(1), 1)
            found[name] = [metrics["loss"], metrics["grad_norm"]]
        except EngineFault as error:
            found[name] = str(error)
    return found


def few(model: Path, ranks: Ranks) -> Found:
    """Make steps of three sequences, a pass each: of two ranks one computes a sequence without terms."""
    tasks = [EpisodeGroup("task", tuple(each for each in groups(1)[0].episodes if len(each.records) == 2)[:1])]
    tasks += [EpisodeGroup("other", groups(1)[1].episodes[1:2])]
    found: Found = {}
    ways: dict[str, dict[str, object]] = {"ours": {}, "ours, kl": {"kl_coef": 0.1}, "verl's": {"loss_name": "vanilla"}}
    for name, changes in ways.items():
        chosen = verl_settings(enable_packing=False, adv_estimator="reinforce_plus_plus", **changes)
        metrics = VerlExecutor(model, chosen, ranks).train_step(tasks, 1)
        found[name] = [metrics["loss"], metrics["grad_norm"]]
        found["bins"] = metrics["bins"]
    chosen = tiny_settings(enable_packing=False, adv_estimator="reinforce_plus_plus")
    metrics = Executor(model, chosen).train_step(tasks, 1)
    found["torch"] = [metrics["loss"], metrics["grad_norm"]]
    return found


def work(model: Path, ranks: Ranks) -> Found:
    """Return the FLOPs of a step of two updates, by verl's engine and by ours where it shares no prefixes."""
    chosen = tiny_settings(mini_batch_num=2, share_prefixes=False)
    verl = VerlExecutor(model, chosen, ranks).train_step(groups(1), 1)
    return {"verl": flops(verl), "torch": flops(Executor(model, chosen).train_step(groups(1), 1))}


def flops(metrics: dict[str, float]) -> float:
    return metrics["model_flops_per_s"] * sum(metrics[name] for name in metrics if name.startswith("seconds_"))


def soft_capped(folder: Path, ranks: Ranks) -> str:
    """Return the refusal of a model that does more to its logits than our head supports."""
    if ranks.leads:
        torch.manual_seed(0)
        config = Gemma2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            final_logit_softcapping=30.0,
        )
        Gemma2ForCausalLM(config).save_pretrained(folder)
        tiny_tokenizer(folder)
    ranks.agree(True)  # no rank goes on before it is there
    try:
        VerlExecutor(folder, tiny_settings(), ranks)
    except EngineFault as error:
        return str(error)
    return ""


if __name__ == "__main__":
    on_ranks(compute)
