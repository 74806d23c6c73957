"""Runs the benchmarks one after the other, each in a process of its own."""

import argparse
import os
import subprocess
import sys

PARTS = {
    "coordinator": ["-m", "bench.coordinator"],
    "gateway": ["-m", "bench.gateway"],
    "floor": ["-m", "bench.floor"],
    "turns": ["-m", "bench.turns"],
    "disk": ["-m", "bench.disk"],
    "episodes": ["-m", "bench.episodes"],
    "asynchronous": ["-m", "bench.asynchronous"],
    "bus": ["bench/bus.py"],
    "recovery": ["-m", "bench.recovery", "--events", "300000"],
    "takeover": ["-m", "bench.takeover", "--times", "3"],
    "engine": ["bench/engine.py", "--cpu-time"],
    "packing": ["bench/packing.py"],
    "client_models": ["-m", "bench.client_models"],
    "trajectories": ["-m", "bench.trajectories"],
    "atropos_wire": ["-m", "bench.atropos_wire"],
    "atropos_api": ["-m", "bench.atropos_api", "--of-atropos", "100", "10000"],
    "operations": ["-m", "bench.operations"],
    "deltas": ["-m", "bench.deltas"],
    "environments": ["-m", "bench.environments"],
    "peak_memory": ["bench/peak_memory.py"],
}


QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "part", nargs="*", choices=[*PARTS, []], metavar="part", help=f"some of {', '.join(PARTS)} (default: all)"
    )
    failed = 0
    for part in parser.parse_args().part or PARTS:
        print(f"\n== {part} ==", flush=True)
        failed |= subprocess.run([sys.executable, *PARTS[part]], env=QUIET | dict(os.environ)).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
