"""Small batches and settings on which both backends are compared, with everything that a batch can contain."""

import math
from pathlib import Path

import torch

from bombus_trainer.data.batch import EpisodeCalls, EpisodeGroup
from bombus_trainer.publish.step_checkpoint import StepFacts
from bombus_trainer.settings import TrainerSettings
from tests.trainer.small_batches import VOCAB, call, episode, tiny_settings

CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "small micro-batches": {"bin_tokens": 64},
    "several updates": {"mini_batch_num": 2, "ppo_epochs": 2},
    "decay and a schedule": {"weight_decay": 0.1, "warmup_steps": 2, "lr_schedule": "linear", "total_steps": 8},
    "a kl term": {"kl_coef": 0.1},
    "tokens count alike": {"loss_aggregation": "token", "adv_estimator": "rloo"},
    "checkpointed activations": {"gradient_checkpointing": True},
    "a sequence a pass": {"enable_packing": False},
    "all scores in memory": {"attn_implementation": "eager"},
    "an entropy bonus": {"entropy_coef": 0.05},
    "gspo": {"loss": "gspo", "clip_low": 1e-3, "clip_high": 1e-3, "mini_batch_num": 2, "ppo_epochs": 2},
    "cispo": {"loss": "cispo", "mini_batch_num": 2, "ppo_epochs": 2},
    "sequence tis": {"correction": "sequence_tis"},
    "sequence mask": {"correction": "sequence_mask", "tis_clip": 1.05, "bin_tokens": 64},
    "off-policy sequence masking": {"use_opsm": True},
}
STEPS = 2
# One row without padding, as on GPUs with flash attention.
PACKED: dict[str, dict[str, object]] = {
    "packed": {"bin_tokens": 256},
    "packed, gspo": {**CASES["gspo"], "bin_tokens": 100},
}
CASES |= PACKED


def settings(case: str) -> TrainerSettings:
    return tiny_settings(**CASES[case])


def groups(seed: int) -> list[EpisodeGroup]:
    """Make three tasks of four episodes: two turns, a branch, several temperatures, prompts and replies of any size."""
    episodes = {g: [_episode(f"e{g}{i}", 100 * seed + 10 * g + i, i) for i in range(4)] for g in range(3)}
    return [EpisodeGroup(f"task{g}", tuple(members)) for g, members in episodes.items()]


def _episode(name: str, seed: int, number: int) -> EpisodeCalls:
    random = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most + 1, (1,), generator=random))
        return torch.randint(VOCAB, (count,), generator=random).tolist()

    uniform = -math.log(VOCAB)
    first = call(f"{name}a", list(range(20)), draw(1, 9), logprob=uniform, temperature=0.7, episode=name)
    second = call(f"{name}b", draw(1, 6), draw(2, 12), parent=first, logprob=uniform, episode=name)
    branch = call(f"{name}c", draw(3, 30), draw(1, 5), parent=first, logprob=uniform, temperature=1.3, episode=name)
    records = (first, second, branch) if number % 2 else (first, second)
    return episode(name, float(number == 1) + 0.25 * number, *records)


def facts(step: int) -> StepFacts:
    return StepFacts(engine="main", run=1, step=step, trainer_epoch=1, attempt=1, config_digest="c", metrics={})


def model_folder(folder: Path) -> Path:
    return folder / "model"
