"""Operations of training through a whole hive, beside the trainer's executor alone.

    python -m bench.operations

A hive of processes with the tiny model, and a client of xorl's routes over HTTP. A step without a gradient is an
operation that does nothing; a forward_backward has 16 sequences of 16 to 64 tokens. CPU seconds of each process, which
repeat on a machine that others use too, and wall time, which does not.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import psutil
import torch

from bench.client_models import SHORT, STEP, data_of, executor, run
from bench.processes import cpu_s
from bombus.operations import Datum, ForwardBackward, LossSpec
from bombus.weights.models import build_tiny

MODEL = "default"


@contextmanager
def hive(folder: Path) -> Iterator[tuple[httpx.Client, dict[str, int]]]:
    """Run `bombus up` while the block runs. Yields a client of it, and its processes by name."""
    command = [sys.executable, "-m", "bombus", "up", "--port", "0", "--data-dir", str(folder), "--threads", "1"]
    with (folder.parent / "up.log").open("wb") as log:
        up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    try:
        assert up.stdout is not None
        url = next(line for line in up.stdout if line.startswith("ready ")).split()[1]
        children = {_name(child.cmdline()): child.pid for child in psutil.Process(up.pid).children()}
        with httpx.Client(base_url=f"{url}/api/v1", timeout=120.0) as client:
            yield client, {name: pid for name, pid in children.items() if name}
    finally:
        up.terminate()
        up.wait(60)


def _name(command: list[str]) -> str:
    found = [name for name in ("gateway", "coordinator", "trainer") if name in command]
    return found[0] if found else ("nats" if "nats-server" in command[0] else "")


class Trained:
    """A model of xorl's client."""

    def __init__(self, client: httpx.Client, base: str) -> None:
        self._client = client
        self._seq = 0
        self.result(self._post("create_model", {"base_model": base, "lora_config": {"rank": 8}}))

    def _post(self, route: str, body: dict[str, Any]) -> str:
        answer = self._client.post(route, json={"model_id": MODEL, **body}).raise_for_status().json()
        return str(answer["request_id"])

    def send(self, route: str, body: dict[str, Any]) -> str:
        self._seq += 1
        return self._post(route, {"seq_id": self._seq, **body})

    def result(self, request: str) -> dict[str, Any]:
        while True:
            answer: dict[str, Any] = self._client.post("retrieve_future", json={"request_id": request}).json()
            if "error" in answer:
                raise SystemExit(answer["error"])
            if answer.get("type") != "try_again":
                return answer

    def step(self) -> str:
        return self.send("optim_step", {"adam_params": {"learning_rate": 1e-4}})

    def forward_backward(self, data: list[dict[str, Any]]) -> str:
        return self.send("forward_backward", {"forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}})


def as_json(datum: Datum) -> dict[str, Any]:
    tokens = torch.frombuffer(bytearray(datum.tokens), dtype=torch.int32).tolist()
    return {
        "model_input": {"input_ids": tokens},
        "loss_fn_inputs": {"target_tokens": [int(value) for value in datum.inputs["target_tokens"].values()]},
    }


def measured(title: str, work: Callable[[], object], operations: int, processes: dict[str, int]) -> None:
    """Print what so many operations cost, after they were done once."""
    work()
    before, began = {name: cpu_s(pid) for name, pid in processes.items()}, perf_counter()
    work()
    wall_s = perf_counter() - began
    spent = {name: 1e3 * (cpu_s(pid) - before[name]) / operations for name, pid in processes.items()}
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in sorted(spent.items()))
    print(f"{title}: {sum(spent.values()):.2f} ms of CPU each ({parts}); {operations / wall_s:,.0f} a second")


def alone(root: Path, data: list[Datum], steps: int, passes: int) -> None:
    """Measure the executor in this process."""
    build_tiny(root / "tiny")
    made = executor(root / "tiny", root)
    forward_backward = ForwardBackward(loss=LossSpec("cross_entropy"), data=tuple(data))
    here = {"executor": os.getpid()}

    def stepped() -> None:
        for _ in range(steps):
            run(made, STEP)

    def passed() -> None:
        for _ in range(passes):
            run(made, forward_backward)

    measured("a step without a gradient, executor", stepped, steps, here)
    measured("a forward_backward, executor", passed, passes, here)


def through_the_hive(root: Path, data: list[Datum], steps: int, passes: int) -> None:
    sent = [as_json(datum) for datum in data]
    with hive(root / "data") as (client, processes):
        model = Trained(client, "tiny")

        def queued() -> None:
            for request in [model.step() for _ in range(steps)]:
                model.result(request)

        def passed() -> None:
            for request in [model.forward_backward(sent) for _ in range(passes)]:
                model.result(request)

        def waited() -> None:
            for _ in range(steps):
                model.result(model.step())

        measured("a step without a gradient, hive, each waited for", waited, steps, processes)
        measured(f"a step without a gradient, hive, a queue of {steps}", queued, steps, processes)
        measured("a forward_backward, hive", passed, passes, processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="without a gradient (default %(default)s)")
    parser.add_argument("--passes", type=int, default=40, metavar="N", help="forward_backward (default %(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = data_of(16, SHORT)
    with tempfile.TemporaryDirectory() as temporary:
        alone(Path(temporary), data, given.steps, given.passes)
        through_the_hive(Path(temporary), data, given.steps, given.passes)


if __name__ == "__main__":
    main()
