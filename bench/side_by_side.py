"""Tokens per second of the torch backend's engine with LoRA adapters side by side in one batch.

python -m bench.side_by_side                       # tiny
python -m bench.side_by_side --model smollm2 --adapters 0 1 4 16
"""

import argparse
import time

import torch
from torch import nn

from bench.engine import rate
from bombus.hive.generation import Generate
from bombus.hive.records import SamplingParams, pack_tokens
from bombus.weights.models import resolve_model
from bombus_inference.backends.torch.adapters.loaded import LoadedAdapter
from bombus_inference.backends.torch.adapters.own import LowRank
from bombus_inference.backends.torch.backend import load_policy
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.settings import ComputeSettings


def random_adapter(model: nn.Module, output: nn.Module, rank: int, random: torch.Generator) -> LoadedAdapter:
    """Make an adapter on all linear layers but the output layer."""
    layers: dict[str, LowRank] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not output:
            low_a = 0.01 * torch.randn(rank, layer.in_features, generator=random)
            low_b = 0.01 * torch.randn(layer.out_features, rank, generator=random)
            layers[name] = LowRank(low_a.to(layer.weight), low_b.to(layer.weight))
    return LoadedAdapter(layers, dict.fromkeys(layers, 1.0))


def generate(engine: Engine, addresses: list[str], arguments: argparse.Namespace, salt: int) -> int:
    """Generate for a batch whose sequences take turns with the adapters. None of the prompts is in the cache."""
    for ticket in range(arguments.batch):
        prompt = [salt % 40, salt // 40 % 40, ticket % 40, *range(arguments.prompt - 3)]
        sampling = SamplingParams(max_tokens=arguments.new)
        address = addresses[ticket % len(addresses)]
        packed = pack_tokens(token % 40 for token in prompt)
        engine.add(
            ticket, Generate(id=str(ticket), engine="main", run=1, prompt=packed, sampling=sampling, adapter=address)
        )
    while engine.has_work:
        engine.step()
    return int(arguments.batch * arguments.new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--adapters", nargs="+", type=int, default=[0, 1, 4])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=48, help="tokens")
    parser.add_argument("--new", type=int, default=32, help="tokens of each completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds, for a machine that others use too")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    settings = ComputeSettings.model_validate(
        {"dtype": arguments.dtype, "kv_cache_bytes": 1 << 30, "max_model_len": 512, "adapters_bytes": 1 << 34}
    )
    model = load_policy(resolve_model(arguments.model), settings)
    random = torch.Generator().manual_seed(0)
    output = model.get_output_embeddings()
    made = [random_adapter(model, output, arguments.rank, random) for _ in range(max(arguments.adapters))]
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.model} in {arguments.dtype}")
    print(f"batch of {arguments.batch}, prompts of {arguments.prompt}, {arguments.new} new, rank {arguments.rank}")
    print("| adapters in the batch | tok/s | of those without |\n|---|---|---|")
    engine = Engine(model, settings, run=1, version=0)
    for number, adapter in enumerate(made):
        engine.add_adapter(f"{number:064x}", adapter)
    without, salt = 0.0, iter(range(1600))
    for count in arguments.adapters:
        addresses = [f"{number:064x}" for number in range(count)] or [""]
        generate(engine, addresses, arguments, next(salt))  # allocates buffers and touches their pages
        speed = rate(
            lambda addresses=addresses: generate(engine, addresses, arguments, next(salt)),  # type: ignore[misc]
            arguments.repeats,
            clock,
        )
        without = without or speed
        print(f"| {count} | {speed:.0f} | {speed / without:.2f} |", flush=True)


if __name__ == "__main__":
    main()
