"""What the gateway adds to a call: its CPU, and its time compared with a direct call of the replica.

One `bombus up` with the tiny model; at most 64 tokens a call (half of them on average: the model ends at random). The
gateway and the replica are called in turn, with 1, 32 and 256 calls at once, streamed and not.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.processes import cpu_s, gateway_process
from bombus import AsyncSwarmClient, Job
from bombus.bus import Bus
from bombus.demo.hive import free_port
from bombus.hive.generation import Generate, encode_request, replica_key
from bombus.hive.records import SamplingParams, pack_tokens
from bombus.hive.subjects import SIGNING_SECRET

TOKENS = 64
PROMPT = list(range(4, 44))  # about as long as the rendered chat
STOPS = (1, 3)  # of the tiny model: <eos> and <|im_end|>


async def send_requests(host: str, port: int, requests: list[bytes]) -> list[float]:
    """Send requests one after another on one connection, and return the seconds of each."""
    reader, writer = await asyncio.open_connection(host, port)
    took: list[float] = []
    for request in requests:
        began = time.perf_counter()
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 200 " in head[:20], head + await reader.read(500)
        length = re.search(rb"content-length: (\d+)", head)
        if length:
            await reader.readexactly(int(length[1]))
        else:
            while size := int((await reader.readline()).strip(), 16):
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        took.append(time.perf_counter() - began)
    writer.close()
    return took


def http(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Bench:
    def __init__(self, gateway_port: int, replica_port: int, replica_key: str, pid: int, calls: int) -> None:
        self.replica_key = replica_key
        self.gateway_port = gateway_port
        self.replica_port = replica_port
        self.pid = pid
        self.calls = calls

    async def at(self, concurrency: int, keys: list[str], stream: bool) -> None:
        each = min(max(4, self.calls // concurrency), 64)  # one at a time is slow and does not need a thousand calls
        chat = {
            "model": "m",
            "messages": [{"role": "user", "content": "abcd efgh ijkl"}],
            "max_tokens": TOKENS,
            "stream": stream,
        }
        # The chat ends at its stop tokens, so the direct call has to as well.
        sampling = SamplingParams(max_tokens=TOKENS, temperature=1.0, stop_token_ids=STOPS)
        generate = Generate(id="b", engine="main", run=1, prompt=pack_tokens(PROMPT), sampling=sampling, stream=stream)
        direct = http("/generate", encode_request(generate), f"authorization: Bearer {self.replica_key}")
        through = [
            http("/v1/chat/completions", json.dumps(chat).encode(), f"authorization: Bearer {key}",
                 "content-type: application/json")
            for key in keys[:concurrency]
        ]  # fmt: skip
        alone = await self._run(self.replica_port, [[direct] * each] * concurrency)
        before = cpu_s(self.pid)
        total = await self._run(self.gateway_port, [[request] * each for request in through])
        spent = (cpu_s(self.pid) - before) / (each * concurrency)
        added = [1e3 * (a - b) for a, b in zip(_quantiles(total), _quantiles(alone))]
        print(
            f"{concurrency:4d} at once, {'streamed' if stream else 'whole':8}  gateway CPU {1e3 * spent:5.2f} ms a call"
            f" ({1 / spent:5.0f} calls a core)  added p50 {added[0]:6.1f} ms  p99 {added[1]:6.1f} ms",
            flush=True,
        )

    async def _run(self, port: int, work: list[list[bytes]]) -> list[float]:
        parts = await asyncio.gather(*(send_requests("127.0.0.1", port, requests) for requests in work))
        return sorted(seconds for part in parts for seconds in part)


def _quantiles(seconds: list[float]) -> tuple[float, float]:
    return seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)]


async def run(calls: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        log = (Path(folder) / "up.log").open("w+")
        command = [sys.executable, "-m", "bombus", "up", "--port", str(port), "--data-dir", f"{folder}/hive"]
        up = subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert up.stdout is not None
            assert up.stdout.readline().startswith("ready"), "the hive did not come up"
            async with AsyncSwarmClient(f"http://127.0.0.1:{port}") as client:
                lengths = {
                    "max_prompt_length": 256, "max_response_length": 128,
                    "max_response_length_in_one_turn": 64, "max_model_len": 512, "max_env_worker": 512,
                }  # fmt: skip
                job = Job(model="tiny", batch_size=15_000, num_repeat=2, bombus={"rollout": lengths})
                await client.auto_sync_train_config_and_start_engine(job)
                log.seek(0)
                found = re.search(r"listening at http://[\d.]+:(\d+)  engine", log.read())
                assert found
                keys = [claimed.api_key for claimed in await client.begin_episodes(256)]
                async with await Bus.connect((Path(folder) / "hive/nats-url").read_text().strip(), "main") as bus:
                    key = replica_key(await bus.secret(SIGNING_SECRET))
                bench = Bench(port, int(found[1]), key, gateway_process(up.pid), calls)
                for stream in (False, True):
                    for concurrency in (1, 32, 256):
                        await bench.at(concurrency, keys, stream)
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)
            log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1024, help="for each line")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(run(parser.parse_args().calls))


if __name__ == "__main__":
    main()
