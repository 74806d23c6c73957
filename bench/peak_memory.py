"""Peak memory of a batch whose logits would not fit: our trainer beside full logits, a process each.

    python bench/peak_memory.py                                 8,192 tokens, a vocabulary of 150,000
    python bench/peak_memory.py --tokens 2048                   where 15 GB are not free

Float32 on the CPU. `chunked` and `full logits` are forward and backward of the output layer alone, hidden size 64:
logprobs of the sampled tokens and their gradients, for the hidden states and the output matrix. `trainer` is a whole
step of the torch trainer on two answers that have these tokens between them, with a Llama of one layer; `plain` the
same with transformers and full logits: forward, a policy gradient, backward, AdamW. The figure is the growth of the
process's largest resident set (VmHWM) from before the first product.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bombus.config.job import validated
from bombus.hive.records import CallRecord, Choice, SamplingParams, pack_tokens, spans_of
from bombus.weights.models import load_model
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.backends.torch.head import HeadPlan, OutputLayer, chosen_logprobs
from bombus_trainer.data.batch import EpisodeCalls, EpisodeGroup
from bombus_trainer.settings import TrainerSettings

WAYS = ("chunked", "full logits", "trainer", "plain")
WHOLE = ("full logits", "plain")  # ways that keep all logits, their softmax and its gradient
PROMPT = 8


def peak_bytes() -> int:
    """Return the peak resident memory of this process so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def free_bytes() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def measure(way: str, tokens: int, vocabulary: int, hidden: int) -> dict[str, float]:
    if way in ("chunked", "full logits"):
        return output_layer(way, tokens, vocabulary, hidden)
    with TemporaryDirectory() as folder:
        return step(way, tokens, vocabulary, hidden, Path(folder))


def output_layer(way: str, tokens: int, vocabulary: int, hidden: int) -> dict[str, float]:
    torch.manual_seed(0)
    hidden_UH = torch.randn(tokens, hidden, requires_grad=True)
    weight_VH = torch.randn(vocabulary, hidden, requires_grad=True)
    targets_N = torch.randint(vocabulary, (tokens,))
    (torch.randn(256, 256) @ torch.randn(256, 256)).sum()  # makes the library allocate what it allocates once
    before, started = peak_bytes(), process_time()
    if way == "chunked":
        rows = TrainerSettings().logits_bytes_max // (4 * vocabulary)
        head = HeadPlan(torch.arange(tokens), targets_N, torch.ones(tokens), rows)
        logprobs_N = chosen_logprobs(hidden_UH, OutputLayer(weight_VH), head)[0]
    else:
        logits_UV = hidden_UH @ weight_VH.t()
        logprobs_N = torch.log_softmax(logits_UV, dim=1).gather(1, targets_N[:, None])[:, 0]
        del logits_UV
    loss = logprobs_N.mean()
    loss.backward()
    assert hidden_UH.grad is not None
    return {
        "bytes": peak_bytes() - before,
        "cpu_s": process_time() - started,
        "loss": float(loss.detach()),
        "gradient": float(hidden_UH.grad.norm()),
    }


def step(way: str, tokens: int, vocabulary: int, hidden: int, folder: Path) -> dict[str, float]:
    wide_model(
        folder,
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=1,
        num_key_value_heads=4,
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
    )
    job = validated({"trainer": {"weight_decay": 0.0, "tis_clip": 0.0, "share_prefixes": False}}, {})
    settings = TrainerSettings(job=job, bin_tokens=tokens)
    answers = torch.randint(vocabulary, (2, tokens // 2))
    if way == "trainer":
        executor = Executor(folder, settings, {})
        group = wide_group(answers.tolist(), PROMPT, logprob=-5.0)
        before, started = peak_bytes(), process_time()
        metrics = executor.train_step([group], 1)
        loss, norm = metrics["loss"], metrics["grad_norm"]
    else:
        model = load_model(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.config.lr, weight_decay=0.0)
        before, started = peak_bytes(), process_time()
        logits = model(input_ids=answers, use_cache=False).logits[:, PROMPT - 1 : -1]
        chosen = torch.log_softmax(logits, dim=-1).gather(2, answers[:, PROMPT:, None])[..., 0]
        del logits
        advantages = torch.tensor([[-0.5], [0.5]]) / (0.5**0.5 + 1e-6)  # rewards 0 and 1, less their mean, by their std
        value = -((chosen - chosen.detach()).exp() * advantages).mean()
        value.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.config.grad_clip))
        optimizer.step()
        loss = float(value.detach())
    return {"bytes": peak_bytes() - before, "cpu_s": process_time() - started, "loss": loss, "gradient": norm}


def wide_model(folder: Path, hidden_size: int, **shape: object) -> None:
    """Save a Llama of four heads with this shape, its weights always from the same seed."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_attention_heads=4, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)


def wide_group(answers: list[list[int]], prompt: int, logprob: float) -> EpisodeGroup:
    """Make a group of one episode for each answer, whose reward is its place.

    An answer is one call's tokens: the first `prompt` of them are given, the others were sampled at `logprob`.
    """
    episodes = []
    for place, tokens in enumerate(answers):
        count = len(tokens) - prompt
        logprobs = torch.full((count,), logprob).numpy().tobytes()
        record = CallRecord(
            id=f"call-{place}",
            engine="main",
            run=1,
            episode=f"episode-{place}",
            prompt_tail=pack_tokens(tokens[:prompt]),
            prompt_tokens=prompt,
            choices=(Choice(tokens=pack_tokens(tokens[prompt:]), logprobs=logprobs, spans=spans_of([0] * count)),),
            sampling=SamplingParams(temperature=1.0),
        )
        episodes.append(EpisodeCalls(record.episode, float(place), (record,)))
    return EpisodeGroup("task", tuple(episodes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way:
        print(json.dumps(measure(asked.way, asked.tokens, asked.vocabulary, asked.hidden)))
        return
    logits = 4 * asked.tokens * asked.vocabulary
    print(f"{asked.tokens} tokens, vocabulary {asked.vocabulary}: logits alone would be {logits / 1e9:.2f} GB")
    size = ["--tokens", str(asked.tokens), "--vocabulary", str(asked.vocabulary), "--hidden", str(asked.hidden)]
    for way in WAYS:
        needed, free = (3 * logits if way in WHOLE else 0), free_bytes()
        if needed > free:
            print(f"{way:12} not run: it needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
            continue
        command = [sys.executable, __file__, "--way", way, *size]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            print(f"{way:12} failed (exit {run.returncode}): {run.stderr.strip().splitlines()[-1:]}")
            continue
        found = json.loads(run.stdout)
        print(
            f"{way:12} peak {found['bytes'] / 1e9:6.2f} GB, {found['cpu_s']:.1f} CPU s, "
            f"loss {found['loss']:.6f}, |gradient| {found['gradient']:.6e}"
        )


if __name__ == "__main__":
    main()
