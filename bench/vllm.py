"""Tokens per second of the torch and vllm backends as replicas serve them, and the time of a change of weights.

python -m bench.vllm                                    # smollm2, float32 and bfloat16, 1, 8 and 32 at once
python -m bench.vllm --dtype float32 --at-once 8 --tokens 16
python -m bench.vllm --lora-rank 16                     # an adapter on the model, replaced by another one
"""

import argparse
import asyncio
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bombus.config.job import validated
from bombus.hive.generation import FrameReader, Generate, Tokens
from bombus.hive.records import SamplingParams, pack_tokens
from bombus.weights.models import resolve_model
from bombus_inference.backends.protocol import Deliver, Delivery, InferenceBackend, Policy
from bombus_inference.backends.torch.backend import TorchBackend
from bombus_inference.backends.vllm.backend import VllmBackend
from bombus_inference.settings import ComputeSettings, VllmSettings
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.publish.export import VersionTarget, export_adapter, export_base
from bombus_trainer.settings import TrainerSettings

CONTEXT = 512
PROMPT = 32


class Load:
    """Sends requests and counts the tokens that come back."""

    def __init__(self) -> None:
        self.tokens = 0
        self._left = 0
        self._over = asyncio.Event()
        self._next = 0

    def deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            for frame in FrameReader().feed(delivery.body):
                self.tokens += len(frame.tokens) // 4 if isinstance(frame, Tokens) else 0
            self._left -= delivery.done
        if self._left == 0:
            self._over.set()

    async def rate(self, backend: InferenceBackend, at_once: int, tokens: int) -> float:
        """Return tokens per second over one round of `at_once` requests with different prompts."""
        self.tokens, self._left = 0, at_once
        self._over.clear()
        began = time.perf_counter()
        for _ in range(at_once):
            self._next += 1
            prompt = pack_tokens([100 + self._next % 1000, *range(200, 200 + PROMPT - 1)])
            sampling = SamplingParams(max_tokens=tokens)
            request = Generate(id="b", engine="main", run=1, prompt=prompt, sampling=sampling)
            backend.add(self._next, request)
        await self._over.wait()
        assert self.tokens == at_once * tokens
        return self.tokens / (time.perf_counter() - began)


def make(name: str, settings: ComputeSettings, deliver: Deliver) -> InferenceBackend:
    match name:
        case "torch":
            return TorchBackend(settings, deliver)
        case "vllm":
            return VllmBackend(settings, VllmSettings(), deliver)
        case _:
            return VllmBackend(settings, VllmSettings(eager=True), deliver)


async def quiet(stage: str) -> None: ...


async def bench(name: str, dtype: str, arguments: argparse.Namespace, policies: list[Policy]) -> None:
    """Measure one backend. `policies` are loaded in turn."""
    load = Load()
    limits = {"kv_cache_bytes": 1 << 30, "max_model_len": CONTEXT, "max_running": 64}
    settings = ComputeSettings.model_validate({"dtype": dtype, "threads": arguments.threads, **limits})
    backend = make(name, settings, load.deliver)
    try:
        began = time.perf_counter()
        await backend.load(policies[0], quiet)
        start_s = time.perf_counter() - began
        await load.rate(backend, 2, 8)  # warm
        rates = []
        for at_once in arguments.at_once:
            rounds = [await load.rate(backend, at_once, arguments.tokens) for _ in range(arguments.rounds)]
            rates.append(f"{max(rounds):.0f}")
        swaps = []
        for version in range(1, 4):
            began = time.perf_counter()
            await backend.load(replace(policies[version % 2], version=version), quiet)
            swaps.append(time.perf_counter() - began)
        print(
            f"| {name} {dtype} | {' / '.join(rates)} | {start_s:.1f} | {1000 * min(swaps):.0f} |",
            flush=True,
        )
    finally:
        await backend.stop()


def make_policies(model: Path, lora_rank: int, kept: Path) -> list[Policy]:
    """Return two policies that are loaded from different files."""
    if not lora_rank:
        return [Policy(folder, 1, 0, CONTEXT) for folder in (model, Path(shutil.copytree(model, kept / "other")))]
    executor = Executor(model, TrainerSettings(job=validated({"trainer": {"lora_rank": lora_rank}}, {})))
    base = export_base(executor, kept, 1)
    adapters = [export_adapter(executor, VersionTarget(kept, number, 1), base) for number in (0, 1)]
    return [Policy(Path(base.where), 1, 0, CONTEXT, adapter=Path(each.where)) for each in adapters]


async def run(arguments: argparse.Namespace) -> None:
    print(f"| engine | tokens/s at {' / '.join(map(str, arguments.at_once))} at once | start s | new weights ms |")
    print("|---|---|---|---|")
    for dtype in arguments.dtype:
        model = resolve_model(arguments.model, dtype=dtype)
        with tempfile.TemporaryDirectory() as kept:
            policies = make_policies(model, arguments.lora_rank, Path(kept))
            for name in arguments.engines:
                await bench(name, dtype, arguments, policies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--engines", nargs="+", default=["torch", "vllm-eager"], choices=("torch", "vllm", "vllm-eager")
    )
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--lora-rank", type=int, default=0, help="of an adapter on the model; 0: none")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
