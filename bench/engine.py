"""Tokens per second of the torch backend's engine and of transformers' own `generate`, in one run on one machine.

python bench/engine.py                       # tiny
python bench/engine.py --model smollm2 --dtype float32 bfloat16 --batches 1 8 64
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bombus.hive.generation import Generate
from bombus.hive.records import SamplingParams, pack_tokens
from bombus.weights.models import load_model, resolve_model
from bombus_inference.backends.torch.backend import load_policy
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.settings import ComputeSettings


def rate(work: Callable[[], int], repeats: int, clock: Callable[[], float]) -> float:
    """Return the best of several runs in tokens per second, since other programs can only slow a run down."""
    best = 0.0
    for _ in range(repeats):
        started = clock()
        tokens = work()
        best = max(best, tokens / (clock() - started))
    return best


def by_engine(engine: Engine, prompts: list[list[int]], new_tokens: int) -> int:
    """Generate for all prompts. None of them is in the cache, because one token differs from run to run."""
    salt = random.randrange(1000)
    for ticket, prompt in enumerate(prompts):
        packed = pack_tokens([salt % 40, salt // 40, *prompt[2:]])
        sampling = SamplingParams(max_tokens=new_tokens)
        engine.add(ticket, Generate(id=str(ticket), engine="main", run=1, prompt=packed, sampling=sampling))
    while engine.has_work:
        engine.step()
    return len(prompts) * new_tokens


def bench(folder: Path, dtype: str, arguments: argparse.Namespace) -> None:
    settings = ComputeSettings.model_validate({"dtype": dtype, "kv_cache_bytes": 1 << 30, "max_model_len": 512})
    engine = Engine(load_policy(folder, settings), settings, run=1, version=0)
    plain = load_model(folder, dtype)
    numbers = random.Random(0)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    for batch in arguments.batches:
        groups = -(-batch // arguments.group)
        distinct = [[numbers.randrange(40) for _ in range(arguments.prompt)] for _ in range(groups)]
        prompts = [distinct[index // arguments.group] for index in range(batch)]
        ids = torch.tensor(prompts)

        def by_transformers(ids: torch.Tensor = ids) -> int:
            with torch.inference_mode():
                made = plain.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=arguments.new,
                    eos_token_id=-1,
                    pad_token_id=0,
                )
            return int(ids.shape[0] * (made.shape[1] - ids.shape[1]))

        by_engine(engine, prompts, 2)  # allocates buffers and touches their pages
        ours = rate(lambda prompts=prompts: by_engine(engine, prompts, arguments.new), arguments.repeats, clock)  # type: ignore[misc]
        theirs = rate(by_transformers, arguments.repeats, clock)
        print(
            f"| {arguments.model} | {dtype} | {batch} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=48, help="tokens")
    parser.add_argument("--group", type=int, default=1, help="completions of each prompt, requested one by one")
    parser.add_argument("--new", type=int, default=32, help="tokens of each completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds, for a machine that others use too")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    folder = resolve_model(arguments.model)
    shape = f"prompts of {arguments.prompt} tokens in groups of {arguments.group}, {arguments.new} new"
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {shape}")
    print("| model | dtype | batch | bombus tok/s | transformers tok/s | ratio |\n|---|---|---|---|---|---|")
    for dtype in arguments.dtype:
        bench(folder, dtype, arguments)


if __name__ == "__main__":
    main()
