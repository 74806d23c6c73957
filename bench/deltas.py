"""What deltas save on real steps, and what they cost: GRPO on SmolLM2-135M, exported in bfloat16.

    python -m bench.deltas                     three ways to train, three steps each
    python -m bench.deltas --model tiny        (any model's name or folder)

The model answers 4 prompts 4 times through our engine; the reward is how many of an answer's characters are vowels. Of
each step: the share of values that changed, the delta's bytes over the full file's, and the CPU seconds that the
trainer needs for a full copy and for a delta, and a replica to put the file together, to take the delta in place, and
to read the whole file instead. Weights decay as they do by default. With LoRA also what the adapter costs that travels
alone, and how much of what it adds the merged weights lose by being rounded to bfloat16.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import TypeVar

from tokenizers import Tokenizer

from bombus.config.job import validated
from bombus.hive.events import WeightsReady
from bombus.hive.generation import Generate, Tokens
from bombus.hive.records import CallRecord, Choice, SamplingParams, pack_tokens, spans_of
from bombus.weights.deltas import DELTA_FILE, DELTA_FORMAT, FULL_FILE, DeltaFile, rebuild
from bombus.weights.merging import merge_files
from bombus.weights.models import resolve_model
from bombus_inference.backends.torch.backend import load_policy, read_state
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.backends.torch.patching import read_patches
from bombus_inference.settings import ComputeSettings
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.data.batch import EpisodeCalls, EpisodeGroup
from bombus_trainer.publish.export import VersionTarget, export, export_adapter, export_base, export_delta
from bombus_trainer.publish.host_copy import HostCopy
from bombus_trainer.settings import TrainerSettings

PROMPTS = ("Name a fruit.", "Write a word that rhymes with cat.", "What is the sea like?", "Count to five.")
ANSWERS, ANSWER_TOKENS = 4, 24
WAYS: dict[str, dict[str, object]] = {
    "full, lr 1e-6": {"lr": 1e-6},
    "full, lr 1e-5": {"lr": 1e-5},
    "LoRA r16, lr 1e-4": {"lr": 1e-4, "lora_rank": 16},
}
T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    started = process_time()
    return work(), process_time() - started


def play(engine: Engine, tokenizer: Tokenizer, step: int) -> list[EpisodeGroup]:
    """Return a batch of the model's own answers."""
    asked = [tokenizer.encode(f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n").ids for each in PROMPTS]
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=1.0, seed=step)
    for ticket, prompt in enumerate(asked):
        engine.add(
            ticket,
            Generate(id=str(ticket), engine="main", run=1, prompt=pack_tokens(prompt), sampling=sampling, n=ANSWERS),
        )
    made: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    while engine.has_work:
        for output in engine.step():
            for frame in output.frames:
                if isinstance(frame, Tokens):
                    tokens, logprobs = made.get((output.ticket, frame.choice), (b"", b""))
                    made[output.ticket, frame.choice] = (tokens + frame.tokens, logprobs + frame.logprobs)
    groups = []
    for ticket, prompt in enumerate(asked):
        episodes = tuple(
            episode(f"{step}-{ticket}-{choice}", prompt, *made[ticket, choice], tokenizer) for choice in range(ANSWERS)
        )
        groups.append(EpisodeGroup(f"{step}-{ticket}", episodes))
    return groups


def episode(name: str, prompt: list[int], tokens: bytes, logprobs: bytes, tokenizer: Tokenizer) -> EpisodeCalls:
    text = tokenizer.decode(list(memoryview(tokens).cast("i")))
    choice = Choice(tokens=tokens, logprobs=logprobs, spans=spans_of([0] * (len(tokens) // 4)))
    record = CallRecord(
        id=name,
        engine="main",
        run=1,
        episode=name,
        prompt_tail=pack_tokens(prompt),
        prompt_tokens=len(prompt),
        choices=(choice,),
        sampling=SamplingParams(temperature=1.0),
    )
    return EpisodeCalls(name, sum(letter in "aeiou" for letter in text) / max(len(text), 1), (record,))


def bench(name: str, folder: Path, changes: dict[str, object], steps: int, root: Path) -> None:
    executor = Executor(
        folder, TrainerSettings(job=validated({"model": {"dtype": "bfloat16"}, "trainer": changes}, {}))
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    compute = ComputeSettings(kv_cache_bytes=256 << 20, max_model_len=512)
    held = HostCopy()
    newest = export(executor, VersionTarget(root / "weights", 0, 1), held=held)
    engine = Engine(load_policy(Path(newest.where), compute), compute, run=1, version=0)
    base = Path(newest.where) / FULL_FILE
    for step in range(1, steps + 1):
        executor.train_step(play(engine, tokenizer, step), step)
        full, full_s = timed(lambda step=step: export(executor, VersionTarget(root / "full", step, 1)))  # type: ignore[misc]
        ready = WeightsReady(engine="main", run=1, version=step - 1, weights=newest)
        newest, delta_s = timed(
            lambda step=step, ready=ready: export_delta(executor, VersionTarget(root / "weights", step, 1), held, ready)  # type: ignore[misc]
        )
        if newest.format != DELTA_FORMAT:
            print(f"{name:18} step {step}: a full copy, too much has changed")
            base = Path(newest.where) / FULL_FILE
            continue
        delta, made = Path(newest.where) / DELTA_FILE, root / f"{step}.safetensors"
        found, rebuild_s = timed(lambda base=base, delta=delta, made=made: rebuild(base, [delta], made))  # type: ignore[misc]
        assert found == full.sha256 == newest.sha256
        patches, read_s = timed(lambda delta=delta: read_patches(delta, compute))  # type: ignore[misc]
        _, apply_s = timed(lambda patches=patches, step=step: engine.patch_weights(patches, step, 1))  # type: ignore[misc]
        state, state_s = timed(lambda full=full: read_state(Path(full.where), compute))  # type: ignore[misc]
        del state
        with DeltaFile(delta) as file:
            changed = sum(len(patch.values) for _, patch in file.patches())
        print(
            f"{name:18} step {step}: changed {changed / (newest.bytes / 2):7.3%}, "
            f"delta {newest.delta_bytes / 1e6:6.2f} MB of {newest.bytes / 1e6:.1f} MB = "
            f"{newest.delta_bytes / newest.bytes:6.2%}; trainer: full {full_s:.2f} s, delta {delta_s:.2f} s; "
            f"replica: put together {rebuild_s:.2f} s, delta read {read_s:.2f} s, in place {apply_s * 1e3:.0f} ms, "
            f"whole file read {state_s:.2f} s",
            flush=True,
        )
        base = made
        if "lora_rank" in changes:
            bench_adapter(name, executor, step, root)


def bench_adapter(name: str, executor: Executor, step: int, root: Path) -> None:
    beneath = export_base(executor, root / "adapters", step)
    adapter, adapter_s = timed(lambda: export_adapter(executor, VersionTarget(root / "adapters", step, step), beneath))
    _, merge_s = timed(lambda: merge_files(Path(beneath.where), Path(adapter.where), root / f"merged-{step}"))
    print(
        f"{name:18} step {step}: adapter {adapter.bytes / 1e6:.2f} MB = {adapter.bytes / beneath.bytes:.2%}; trainer: "
        f"{adapter_s:.2f} s; replica that merges: {merge_s:.2f} s; lost when merged: {rounded(executor):.1%}",
        flush=True,
    )


def rounded(executor: Executor) -> float:
    """Return the norm of the rounding error of merged weights in bfloat16, over the norm of what adapters add."""
    lost = added = 0.0
    for adapter in executor.model.adapters.values():
        whole = adapter.merged()
        lost += float((whole.bfloat16().float() - whole).square().sum())
        added += float((whole - adapter.base.weight).square().sum())
    return float((lost / added) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    folder = resolve_model(arguments.model)
    for name, changes in WAYS.items():
        with tempfile.TemporaryDirectory() as root:
            bench(name, folder, changes, arguments.steps, Path(root))


if __name__ == "__main__":
    main()
