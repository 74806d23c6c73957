"""Trained tokens a second, forward and backward: shared prefixes, packed without sharing, and padded batches.

    python bench/packing.py                          a tiny model
    python bench/packing.py --smollm2 FOLDER         a real one (any Hugging Face folder)

All compute the same loss in the same run, with the same output layer (logits at trained tokens only), and may use as
many rows in a micro-batch. What differs is which hidden states they compute. Padded batches are made of sequences in
the order in which they come, and of sequences of similar length. Ratios are of CPU seconds: on a machine that others
use too they repeat, wall time does not.
"""

import argparse
import platform
import tempfile
from collections.abc import Callable, Iterator
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
    """`groups` prompts with `members` completions each, of `completion_min` to `completion_max` tokens.

    Lengths are equally frequent, or, with a `tail`, Pareto's: the share of those over x falls like x to the power of
    -`tail`.
    """

    name: str
    groups: int
    members: int
    prompt: int
    completion_max: int
    completion_min: int = 1
    tail: float = 0.0

    def lengths(self, random: np.random.Generator) -> np.ndarray:
        """Return the lengths of one group's completions."""
        if not self.tail:
            return random.integers(self.completion_min, self.completion_max + 1, self.members)
        drawn = self.completion_min * (1 + random.pareto(self.tail, self.members))
        return np.minimum(drawn, self.completion_max).astype(int)


SHORT = Workload("short answers: 8 x 8, prompt 54, completions 1-15", 8, 8, 54, 15)
LONG = Workload("long prompts: 2 x 8, prompt 300, completions 1-100", 2, 8, 300, 100)
HEAVY = Workload("a heavy tail: 8 x 8, prompt 54, completions 16-1500", 8, 8, 54, 1500, completion_min=16, tail=0.8)


def items_of(work: Workload, vocab: int) -> list[TrainingItem]:
    random = np.random.default_rng(0)
    items: list[TrainingItem] = []
    first_id = 0
    for _ in range(work.groups):
        prompt = random.integers(0, vocab, work.prompt)
        for length in work.lengths(random):
            tokens = np.concatenate([prompt, random.integers(0, vocab, length)])
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


def padded_batches(items: list[TrainingItem], bin_tokens: int) -> Iterator[list[TrainingItem]]:
    """Yield runs of items that have at most `bin_tokens` tokens when they are padded to their longest."""
    batch: list[TrainingItem] = []
    for item in items:
        longest = max(len(each.tokens_T) - 1 for each in (*batch, item))
        if batch and (len(batch) + 1) * longest > bin_tokens:
            yield batch
            batch = []
        batch.append(item)
    yield batch


def run_padded(model: PreTrainedModel, items: list[TrainingItem], bin_tokens: int) -> tuple[float, int]:
    """Do the same with batches padded to their longest sequence."""
    total, rows = 0.0, 0
    for batch in padded_batches(items, bin_tokens):
        longest = max(len(each.tokens_T) for each in batch) - 1
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
    by_length = sorted(items, key=lambda each: len(each.tokens_T))
    trained = sum(len(each.terms) for each in items)
    ways: dict[str, Callable[[], tuple[float, int]]] = {
        "packed and shared": lambda: run_packed(policy, items, bin_tokens, share=True),
        "packed": lambda: run_packed(policy, items, bin_tokens, share=False),
        "padded, by length": lambda: run_padded(plain, by_length, bin_tokens),
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
        for work in (SHORT, LONG, HEAVY):
            measure(work, folder, asked.bin_tokens, asked.repeats)


if __name__ == "__main__":
    main()
