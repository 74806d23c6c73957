"""Peak memory of a training step with a wide vocabulary: verl's engine, packed and padded, beside the torch backend.

Run by the Python that `bombus install verl` makes: `-m bench.verl_memory [--tokens N] [--vocabulary N] [--entropy]`.
A Llama of two layers and hidden size 64, untied, full weights, float32 on the CPU; one micro-batch of four sequences, a
process for each way. The figure is the largest resident set (VmHWM) and what of it the step has added.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from tests.trainer.small_batches import tiny_tokenizer

from bench.peak_memory import peak_bytes, wide_group, wide_model
from bombus.config.job import validated
from bombus_trainer.backend import TrainerBackend
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.backends.verl.executor import VerlExecutor
from bombus_trainer.data.batch import EpisodeGroup
from bombus_trainer.machine import this_machine
from bombus_trainer.ranks import Ranks
from bombus_trainer.settings import TrainerSettings

WAYS = ("torch", "packed", "padded")
SEQUENCES, PROMPT = 4, 20


def model_folder(folder: Path, vocabulary: int, positions: int) -> Path:
    tiny_tokenizer(folder)
    wide_model(
        folder,
        vocab_size=vocabulary,
        hidden_size=64,
        num_hidden_layers=2,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
    )
    return folder


def batch(vocabulary: int, tokens: int) -> list[EpisodeGroup]:
    random = torch.Generator().manual_seed(1)
    replies = [torch.randint(vocabulary, (tokens // SEQUENCES - PROMPT,), generator=random) for _ in range(SEQUENCES)]
    return [wide_group([[*range(PROMPT), *reply.tolist()] for reply in replies], PROMPT, logprob=-11.9)]


def measure(way: str, tokens: int, vocabulary: int, entropy_coef: float) -> str:
    settings = TrainerSettings(job=validated({"trainer": {"entropy_coef": entropy_coef}}, {}), bin_tokens=tokens)
    with TemporaryDirectory() as place:
        folder = model_folder(Path(place), vocabulary, tokens)
        alone = Ranks.alone()
        backend: TrainerBackend = (
            Executor(folder, settings)
            if way == "torch"
            else VerlExecutor(folder, settings, alone, packed=way == "packed")
        )
        before, started = peak_bytes(), perf_counter()
        metrics = backend.train_step(batch(vocabulary, tokens), 1)
    peak, seconds = peak_bytes(), perf_counter() - started
    return (
        f"{way:8} peak {peak / 1e9:.2f} GB, of the step {(peak - before) / 1e9:.2f} GB, {seconds:.0f} s, "
        f"loss {metrics['loss']:.6f}, norm {metrics['grad_norm']:.5f}, entropy {metrics['entropy']:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--entropy", action="store_true", help="with a bonus: the entropy has a gradient")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.way:
        print(measure(asked.way, asked.tokens, asked.vocabulary, 0.01 if asked.entropy else 0.0))
        return
    print(this_machine("cpu"))
    logits = 4 * asked.tokens * asked.vocabulary
    print(f"{asked.tokens} tokens, vocabulary {asked.vocabulary}: the logits once would be {logits / 1e9:.2f} GB")
    for way in WAYS:
        command = [sys.executable, "-m", "bench.verl_memory", *sys.argv[1:], "--way", way]
        done = subprocess.run(command, capture_output=True, text=True)
        print(done.stdout.strip().splitlines()[-1] if done.returncode == 0 else done.stderr[-2000:], flush=True)


if __name__ == "__main__":
    main()
