"""Whole steps worked out without any of our code: peft's adapter, torch's AdamW, one sequence at a time."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from bombus.operations import CheckpointKind, CheckpointSaved, Datum, LossSpec, Reduction, SaveWeights
from tests.trainer.operations.small_models import (
    created,
    datum,
    executor,
    floats,
    forward_backward,
    logprobs,
    optim_step,
    scored,
    stepped,
)

# Tokens, the sampler's logprobs and advantages, of three sequences; the first tokens of each are its prompt.
SEQUENCES = [
    ([5, 6, 7, 8, 9], [0.0, 0.0, -3.0, -4.5, -2.0], [0.0, 0.0, 1.5, 1.5, 1.5]),
    ([5, 6, 7, 3], [0.0, 0.0, -5.0, -4.0], [0.0, 0.0, -0.7, -0.7]),
    ([11, 12, 40], [0.0, -3.5, -4.0], [0.0, 0.4, 0.4]),
]
TRAINED = 7  # tokens with an advantage
ADAM = {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.3, "grad_clip_norm": 0.5}


def data() -> list[Datum]:
    return [datum(tokens, logprobs=floats(*sent), advantages=floats(*given)) for tokens, sent, given in SEQUENCES]


def targets_of(tokens: list[int]) -> list[int]:
    return [*tokens[1:], 0]


def by_hand(base: Path, adapter: str, steps: int) -> tuple[list[float], list[float]]:
    """Return the norms of the gradients, and at last the logprobs of all targets."""
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter, is_trainable=True
    )
    model.eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3)

    def logprobs_of(tokens: list[int]) -> torch.Tensor:
        rows = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
        return rows[torch.arange(len(tokens)), targets_of(tokens)]

    norms = []
    for _ in range(steps):
        total = torch.zeros(())
        for tokens, sent, advantages in SEQUENCES:
            ratio = (logprobs_of(tokens) - torch.tensor(sent)).exp()
            given = torch.tensor(advantages)
            total = total - torch.minimum(ratio * given, ratio.clamp(0.8, 1.2) * given).sum()
        adam.zero_grad()
        (total / TRAINED).backward()
        norms.append(float(clip_grad_norm_(trained, 0.5)))
        adam.step()
    with torch.no_grad():
        return norms, [value for tokens, _, _ in SEQUENCES for value in logprobs_of(tokens).tolist()]


def test_steps_of_ppo_are_those_worked_out_by_hand(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    begun = made.execute("a", SaveWeights(checkpoint=CheckpointKind.SAMPLER, name="begun"))
    assert isinstance(begun, CheckpointSaved)
    first, *others = data()
    steps = []
    for _ in range(3):
        scored(made, "a", forward_backward(first, loss=LossSpec("ppo")))
        scored(made, "a", forward_backward(*others, loss=LossSpec("ppo")))
        steps.append(stepped(made, "a", optim_step(Reduction.TOKEN_MEAN, **ADAM)))
    norms, wanted = by_hand(base, begun.folder, 3)
    assert {step.divisor for step in steps} == {TRAINED}
    assert max(norms) > 0.5
    assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=1e-3)
    found = scored(made, "a", forward_backward(*data(), loss=LossSpec("ppo"), forward_only=True))
    assert logprobs(found) == pytest.approx(wanted, abs=1e-4)
