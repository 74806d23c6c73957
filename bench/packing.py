"""Trained tokens a second, forward and backward: shared prefixes, packed without sharing, and padded.

    python bench/packing.py                          a tiny model
    python bench/packing.py --smollm2 FOLDER         a real one (any Hugging Face folder)

All three compute the same loss in the same run, with the same output layer (logits at trained tokens only), and may
use as many rows in a micro-batch. What differs is which hidden states they compute. Ratios are of CPU seconds: on
a machine that others use too they repeat, wall time does not.
"""

import argparse
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch
from transformers import PreTrainedModel

from bombus.config.job import validated
from bombus.weights.models import build_tiny, load_model
from bombus_trainer.backends.torch.head import HeadPlan, OutputLayer, chosen_logprobs
from bombus_trainer.backends.torch.model import PolicyModel
from bombus_trainer.data.packing import Terms, TrainingItem, pack
from bombus_trainer.settings import TrainerSettings


@dataclass(frozen=True)
class Workload:
    """`groups` prompts with `members` completions each, of 1 to `completion_max` tokens."""

    name: str
    groups: int
    members: int
    prompt: int
    completion_max: int


SHORT = Workload("short answers: 8 x 8, prompt 54, completions 1-15", 8, 8, 54, 15)
LONG = Workload("long prompts: 2 x 8, prompt 300, completions 1-100", 2, 8, 300, 100)


def items_of(work: Workload, vocab: int) -> list[TrainingItem]:
    random = np.random.default_rng(0)
    items: list[TrainingItem] = []
    first_id = 0
    for _ in range(work.groups):
        prompt = random.integers(0, vocab, work.prompt)
        for _ in range(work.members):
            tokens = np.concatenate([prompt, random.integers(0, vocab, random.integers(1, work.completion_max + 1))])
            positions = np.arange(work.prompt, len(tokens))
            ones = np.ones(len(positions), dtype=np.float32)
            ids = np.arange(first_id, first_id + len(positions))
            items.append(TrainingItem(tokens, positions, Terms(ids, tokens[positions], ones, ones, ones, ones)))
            first_id += len(positions)
    return items


def run_packed(policy: PolicyModel, items: list[TrainingItem], bin_tokens: int, share: bool) -> tuple[float, int]:
    """Return the summed logprob and how many rows were computed."""
    total, rows = 0.0, 0
    for packed in pack(items, bin_tokens, share):
        loss = policy.score(packed).logprobs_N.sum()
        loss.backward()
        total, rows = total + float(loss.detach()), rows + len(packed.tokens_T)
    return total, rows


def run_padded(model: PreTrainedModel, items: list[TrainingItem], bin_tokens: int) -> tuple[float, int]:
    """Do the same with batches padded to their longest sequence, each of sequences of similar length."""
    ordered = sorted(items, key=lambda each: len(each.tokens_T))
    total, rows, start = 0.0, 0, 0
    while start < len(ordered):
        end = start + 1
        while end < len(ordered) and (end + 1 - start) * (len(ordered[end].tokens_T) - 1) <= bin_tokens:
            end += 1
        batch, start = ordered[start:end], end
        longest = len(batch[-1].tokens_T) - 1
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros(len(batch), longest, dtype=torch.long)
        for line, each in enumerate(batch):
            length = len(each.tokens_T) - 1
            ids[line, :length] = torch.from_numpy(each.tokens_T[:-1])
            mask[line, :length] = 1
        hidden = model.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        at = np.concatenate([line * longest + each.positions_N - 1 for line, each in enumerate(batch)])
        count = len(at)
        head = HeadPlan(
            torch.arange(count),
            torch.from_numpy(np.concatenate([each.terms.targets_N for each in batch])),
            torch.ones(count),
            rows_max=max(16, (128 << 20) // (4 * model.config.vocab_size)),
        )
        flat = hidden.reshape(-1, hidden.shape[-1]).index_select(0, torch.from_numpy(at))
        loss = chosen_logprobs(flat, OutputLayer(model.get_output_embeddings().weight), head)[0].sum()
        loss.backward()
        total, rows = total + float(loss.detach()), rows + ids.numel()
    return total, rows


def measure(work: Workload, folder: Path, bin_tokens: int, repeats: int) -> None:
    policy = PolicyModel.load(folder, TrainerSettings(job=validated({"model": {"dtype": "float32"}}, {})))
    plain = load_model(folder, dtype="float32")
    items = items_of(work, policy.vocab_size)
    trained = sum(len(each.terms) for each in items)
    ways: dict[str, Callable[[], tuple[float, int]]] = {
        "packed and shared": lambda: run_packed(policy, items, bin_tokens, share=True),
        "packed": lambda: run_packed(policy, items, bin_tokens, share=False),
        "padded": lambda: run_padded(plain, items, bin_tokens),
    }
    wall, cpu = dict.fromkeys(ways, float("inf")), dict.fromkeys(ways, float("inf"))
    found: dict[str, tuple[float, int]] = {}
    for _ in range(repeats):  # in turns, so that a busy machine is busy for all of them
        for name, way in ways.items():
            start, used = perf_counter(), process_time()
            found[name] = way()
            wall[name] = min(wall[name], perf_counter() - start)
            cpu[name] = min(cpu[name], process_time() - used)
            for model in (*policy.trainable().values(), *plain.parameters()):
                model.grad = None
    print(f"\n{work.name}: {len(items)} sequences, {trained} trained tokens, bins of {bin_tokens}")
    print(f"{'':<20}{'rows':>7}{'wall s':>9}{'CPU s':>9}{'trained tok/s':>15}{'ratio':>8}{'sum of logprobs':>18}")
    for name in ways:
        total, rows = found[name]
        speed, ratio = trained / wall[name], cpu["padded"] / cpu[name]
        print(f"{name:<20}{rows:>7}{wall[name]:>9.3f}{cpu[name]:>9.3f}{speed:>15.0f}{ratio:>7.2f}x{total:>18.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, help="a model's folder; without it a tiny model is made")
    parser.add_argument("--bin-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(f"torch {torch.__version__}, {asked.threads} threads, {platform.machine()}, full fine-tuning, float32")
    with tempfile.TemporaryDirectory() as made:
        folder = asked.smollm2
        if folder is None:
            folder = Path(made)
            build_tiny(folder)
        for work in (SHORT, LONG):
            measure(work, folder, asked.bin_tokens, asked.repeats)


if __name__ == "__main__":
    main()
