"""CPU time of a POST of a rollout group and of a GET of a batch, here and in Atropos's own server.

    python -m bench.atropos_wire

Both run under uvicorn, one process each, and CPU seconds are those of the whole process. Ours does all that the gateway
does with a body before it stores it: it inflates it, reads it with all checks, makes its record and digests it. It
stores nothing, so this is the wire's share of a request. Atropos's is measured where atroposlib 0.4.0 is in
.venv-atropos (tests/gateway/atropos/test_beside_atropos.py says how).
"""

import argparse
import gzip
import http.client
import json
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import uvicorn

from bench.processes import cpu_s
from bombus.hive.records import digest
from bombus.hive.trajectories.records import decode_group
from bombus_gateway.atropos import answers
from bombus_gateway.atropos.batches import write_batch
from bombus_gateway.atropos.compression import inflated, sent
from bombus_gateway.atropos.scored_data import read_scored_data, record_of

ATROPOS = Path(__file__).parent.parent / ".venv-atropos/bin/python"
SEQUENCES = 8
ROUNDS = 3
TRAINER = {
    "wandb_group": "g",
    "wandb_project": "p",
    "max_token_len": 4096,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 0,
    "starting_step": 0,
    "num_steps": 1,
}


class Wire:
    """An application that keeps records in memory, and hands them out once."""

    def __init__(self) -> None:
        self._records: list[bytes] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        given = {name: value.decode() for name, value in scope["headers"]}
        headers: dict[str, str] = {}
        if scope["path"] == "/scored_data":
            body = b""
            more = True
            while more:
                message = await receive()
                body += message["body"]
                more = message["more_body"]
            record = record_of(read_scored_data(inflated(given.get(b"content-encoding", ""), body)))
            digest(record)
            self._records.append(record)
            parts = iter([answers.RECEIVED])
        elif scope["path"] == "/batch":
            records, self._records = self._records, []
            headers, parts = sent(write_batch(map(decode_group, records)), given.get(b"accept-encoding", ""))
        else:
            parts = iter([answers.write_welcome(True)])
        written = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": written})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Client:
    """A client that counts the server's CPU seconds."""

    def __init__(self, pid: int, port: int) -> None:
        self._pid = pid
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> int:
        """Make a request, and return the size of the answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, body, {"content-type": "application/json"} | named)
        answer = self._connection.getresponse()
        assert answer.status == 200, answer.read()
        return len(answer.read())

    def push_ms(self, body: bytes, times: int, **headers: str) -> float:
        began = cpu_s(self._pid)
        for _ in range(times):
            self.ask("POST", "/scored_data", body, **headers)
        return (cpu_s(self._pid) - began) / times * 1000

    def batch_ms(self, accepted: str) -> tuple[float, int]:
        """Return the CPU time of a batch, and its bytes."""
        began = cpu_s(self._pid)
        size = self.ask("GET", "/batch", accept_encoding=accepted)
        return (cpu_s(self._pid) - began) * 1000, size


@contextmanager
def running(command: list[str]) -> Iterator[Client]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([*command, str(port)])
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.1)
        yield Client(process.pid, port)
    finally:
        process.terminate()
        process.wait(30)


def rollout_group(tokens: int, seed: int = 0) -> bytes:
    """Return a group as an environment with ManagedServer sends it: a quarter of each sequence is its prompt."""
    chance = random.Random(seed)
    prompt = tokens // 4
    sequences = [[chance.randrange(128_000) for _ in range(tokens)] for _ in range(SEQUENCES)]
    logprobs = struct.unpack(
        f"<{tokens}f", struct.pack(f"<{tokens}f", *[-chance.expovariate(1) for _ in range(tokens)])
    )
    group = {
        "tokens": sequences,
        "masks": [[-100] * prompt + row[prompt:] for row in sequences],
        "scores": [chance.random() for _ in sequences],
        "inference_logprobs": [[1.0] * prompt + list(logprobs[prompt:]) for _ in sequences],
        "ref_logprobs": None,
        "overrides": None,
        "group_overrides": None,
        "messages": None,
    }
    return json.dumps(group).encode()


def measured(command: list[str], tokens: int) -> dict[str, float]:
    """Return milliseconds of the server's CPU: the median of some rounds."""
    body = rollout_group(tokens)
    packed = gzip.compress(body)
    found: dict[str, list[float]] = {}
    times = 2**17 // tokens
    groups = 2**16 // tokens  # in a batch
    with running(command) as client:
        for _ in range(ROUNDS):
            client.ask("GET", "/reset_data")
            found.setdefault("POST", []).append(client.push_ms(body, times))
            found.setdefault("POST, gzip", []).append(client.push_ms(packed, times, content_encoding="gzip"))
            for accepted in ("identity", "gzip"):
                client.ask("GET", "/reset_data")
                client.ask("POST", "/register", json.dumps(TRAINER | {"batch_size": groups * SEQUENCES}).encode())
                client.ask("GET", "/batch")  # what is left here of the pushes before
                for _ in range(groups):
                    client.ask("POST", "/scored_data", body)
                cost, size = client.batch_ms(accepted)
                assert size > groups * 1000
                found.setdefault(f"GET /batch, {accepted}, for each group", []).append(cost / groups)
    return {name: median(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.atropos_wire", description=__doc__)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    port = parser.parse_args().serve
    if port is not None:
        uvicorn.run(Wire(), port=port, log_level="error")
        return
    for tokens in (2048, 256):
        ours = measured([sys.executable, "-m", "bench.atropos_wire", "--serve"], tokens)
        theirs: dict[str, float] = {}
        if ATROPOS.exists():
            server = [str(ATROPOS), "-m", "uvicorn", "atroposlib.api.server:app", "--log-level", "error", "--port"]
            theirs = measured(server, tokens)
        print(f"\nms of CPU for a group of {SEQUENCES} x {tokens} tokens   ours   Atropos   Atropos / ours")
        for name, cost in ours.items():
            beside = f"{theirs[name]:8.2f} {theirs[name] / cost:10.1f}" if theirs else ""
            print(f"{name:42} {cost:8.2f} {beside}")


if __name__ == "__main__":
    main()
