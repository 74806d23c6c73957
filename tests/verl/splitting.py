"""What ranks find that compute parts of the same rows: steps, gradients, and refusals of what cannot be split."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from bombus.errors import EngineFault
from bombus_trainer.backends.torch.metrics import Tally
from bombus_trainer.backends.verl import engine as verl_engine
from bombus_trainer.backends.verl.executor import VerlExecutor
from bombus_trainer.data.batch import mini_batches, prepare
from bombus_trainer.ranks import Ranks
from tests.trainer.small_batches import tiny_settings
from tests.verl.families import files_of, miniature
from tests.verl.given import CASES as WAYS
from tests.verl.given import groups, model_folder
from tests.verl.processes import on_ranks
from tests.verl.rank import Found, steps

CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "several updates": WAYS["several updates"],
    "small rows": {"bin_tokens": 48, "mini_batch_num": 2},
    "a sequence a pass": {"enable_packing": False, "entropy_coef": 0.05},
    "checkpointed activations": {"gradient_checkpointing": True, "kl_coef": 0.1},
    "gspo": WAYS["gspo"],
    "all scores in memory": {"attn_implementation": "eager"},
    "an adapter": {"lora_rank": 4, "lora_alpha": 8, "kl_coef": 0.1},
}
FAMILIES = ("deepseek_v3", "gpt_oss", "olmo3")  # values of another width, and experts; sinks and windows; windows
OF_FOUR = ("plain", "small rows", "a sequence a pass")  # by four ranks too, in one group and in two
# A tower for images; recurrent layers; convolutions; attention of its own; verl looks for what its configuration lacks.
CANNOT = ("gemma3", "qwen3_next", "lfm2", "gptj", "gpt_neox")
KINDS: dict[str, dict[str, object]] = {"lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}}


def compute(folder: Path, ranks: Ranks) -> Found:
    """Return what these ranks find when all of them share each row, and two of four."""
    found: Found = {str(ranks.size): of_sharing(folder, ranks.size, ranks)}
    if ranks.size == 4:
        found["2"] = of_sharing(folder, 2, ranks)
    if ranks.size == 2:
        found["refused"] = {
            family: refusal(miniature(family, folder / family, ranks, fields=KINDS.get(family)), ranks)
            for family in CANNOT
        }
        found["too many"] = refusal(model_folder(folder), ranks, sharing=4)
        found["flash"] = refusal(model_folder(folder), ranks, sharing=1, attn_implementation="flash_attention_3")
    return found


def of_sharing(folder: Path, sharing: int, ranks: Ranks) -> Found:
    """Return the metrics of steps, and where the gradients of a batch are, for each case and family."""
    found: Found = {}
    for case, changes in CASES.items():
        if ranks.size == 4 and case not in OF_FOUR:
            continue
        place = folder / f"{sharing} of {ranks.size}" / case
        backend = started(model_folder(folder), sharing, ranks, changes)
        gradients = gradients_of(backend, ranks, place)
        found[case] = {"gradients": gradients, "steps": steps(backend, ranks, place)}
    for family in FAMILIES:
        backend = started(miniature(family, folder / family, ranks), sharing, ranks, {})
        found[family] = {"gradients": gradients_of(backend, ranks, folder / f"{sharing} of {ranks.size}" / family)}
    return found


def started(model: Path, sharing: int, ranks: Ranks, changes: Mapping[str, object]) -> VerlExecutor:
    settings = tiny_settings(backend="verl", ulysses_parallel_size=sharing, **changes)
    return VerlExecutor(model, settings, ranks, files_of(model))


def gradients_of(backend: VerlExecutor, ranks: Ranks, place: Path) -> str:
    """Write the gradients of the first batch by the leader, and return where they are. No update is made."""
    settings, engine = backend.settings, backend._engine
    batch = prepare(groups(1), settings, backend.vocab_size)
    items = [item for part in mini_batches(batch, settings, 1, 0) for item in part]
    found: dict[str, Tensor] = {}
    with verl_engine.training(engine):
        engine.optimizer_zero_grad()
        shares = 0.0
        for micro_batch in backend.micro_batches(items, Tally(), backward=True):
            shares += backend.forward_backward(micro_batch, None, Tally())
        for name, parameter in engine.module.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        engine.optimizer_zero_grad()
    found["loss"] = torch.tensor(sum(ranks.gather(shares)))
    place.mkdir(parents=True, exist_ok=True)
    if ranks.leads:
        save_file(found, place / "gradients.safetensors")
    return str(place / "gradients.safetensors")


def refusal(model: Path, ranks: Ranks, sharing: int = 2, **changes: object) -> str:
    try:
        started(model, sharing, ranks, changes)
    except EngineFault as error:
        return str(error)
    return ""


if __name__ == "__main__":
    on_ranks(compute)
