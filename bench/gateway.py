"""What the gateway adds to a call: its CPU, its time compared with a direct call of the replica, and its memory.

One `bombus up` with the tiny model's text, and a scripted replica of fixed answers of 64 tokens, so that figures mean
the same each time. The gateway and the replica are called in turn, with 1, 32 and 256 calls at once, streamed and not.
Each call has a text of its own and continues none, so that nothing of it is remembered.
"""

import argparse
import asyncio
import json
import os
import random
import re
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from bench.processes import cpu_ns, process_of
from bench.scripted import scripted_replica
from bombus import AsyncSwarmClient, Job
from bombus.bus import Bus
from bombus.demo import hive
from bombus.hive.generation import Generate, encode_request
from bombus.hive.records import SamplingParams, pack_tokens
from bombus.machine.process import loop_factory

TOKENS = 64
ANSWER = [4 + number % 30 for number in range(TOKENS)]  # letters of the tiny model
PROMPT = list(range(4, 44))  # about as long as the rendered chat
LETTERS = "abcdefghijklmnopqrstuvwxyz "
ASKED = 14  # letters
EACH_MAX = 256  # calls on one connection: one at a time is slow and does not need a thousand
WARM = 64  # calls of each kind before any is measured

_random = random.Random(0)


async def send_requests(port: int, requests: list[bytes]) -> list[float]:
    """Send requests one after another on one connection, and return the seconds of each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
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


def chat(key: str, stream: bool) -> bytes:
    """Return a request with a text of its own."""
    messages = [{"role": "user", "content": "".join(_random.choices(LETTERS, k=ASKED))}]
    body = {"model": "m", "messages": messages, "max_tokens": TOKENS, "stream": stream}
    headers = f"authorization: Bearer {key}", "content-type: application/json"
    return http("/v1/chat/completions", json.dumps(body).encode(), *headers)


class Bench:
    def __init__(self, gateway_port: int, replica_port: int, calls: int) -> None:
        self.gateway_port = gateway_port
        self.replica_port = replica_port
        self.pid = process_of(os.getpid(), "gateway")
        self.calls = calls

    @property
    def memory_mb(self) -> float:
        """The resident memory of the gateway."""
        return psutil.Process(self.pid).memory_info().rss / 1e6

    async def until_served(self, key: str) -> None:
        """Wait until the gateway knows the replica, which it may learn later than this process does."""
        async with asyncio.timeout(60):
            while True:
                try:
                    return await self.warm([key], stream=False)
                except AssertionError as error:
                    if b" 503 " not in error.args[0][:20]:
                        raise
                await asyncio.sleep(0.1)

    async def warm(self, keys: list[str], stream: bool) -> None:
        await self._run(self.gateway_port, [[chat(key, stream)] for key in keys])

    async def at(self, concurrency: int, keys: list[str], stream: bool) -> None:
        each = min(max(4, self.calls // concurrency), EACH_MAX)
        sampling = SamplingParams(max_tokens=TOKENS)
        generate = Generate(id="b", engine="main", run=1, prompt=pack_tokens(PROMPT), sampling=sampling, stream=stream)
        direct = http("/generate", encode_request(generate))
        through = [[chat(key, stream) for _ in range(each)] for key in keys[:concurrency]]
        alone = await self._run(self.replica_port, [[direct] * each] * concurrency)
        before, began = cpu_ns(self.pid), time.perf_counter()
        total = await self._run(self.gateway_port, through)
        rate = each * concurrency / (time.perf_counter() - began)
        spent = (cpu_ns(self.pid) - before) / (each * concurrency)
        added = [1e3 * (a - b) for a, b in zip(_quantiles(total), _quantiles(alone))]
        print(
            f"{concurrency:4d} at once, {'streamed' if stream else 'whole':8}  gateway CPU {spent / 1e6:5.3f} ms a call"
            f"  {rate:5.0f} calls/s  added p50 {added[0]:6.1f} ms  p99 {added[1]:6.1f} ms",
            flush=True,
        )

    async def _run(self, port: int, work: list[list[bytes]]) -> list[float]:
        parts = await asyncio.gather(*(send_requests(port, requests) for requests in work))
        return sorted(seconds for part in parts for seconds in part)


def _quantiles(seconds: list[float]) -> tuple[float, float]:
    return seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)]


async def run(calls: int, durability: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        running = hive.running(Path(folder), threads=1, durability=durability)
        async with running as url, AsyncSwarmClient(url) as client:
            lengths = {
                "max_prompt_length": 256, "max_response_length": 128,
                "max_response_length_in_one_turn": TOKENS, "max_model_len": 512, "max_env_worker": 512,
            }  # fmt: skip
            job = Job(model="tiny", batch_size=15_000, num_repeat=2, bombus={"rollout": lengths})
            await client.auto_sync_train_config_and_start_engine(job)
            keys = [claimed.api_key for claimed in await client.begin_episodes(256)]
            nats = (Path(folder) / "hive/nats-url").read_text().strip()
            async with await Bus.connect(nats, "main") as bus, scripted_replica(bus, "main", [ANSWER]) as replica:
                bench = Bench(urlsplit(url).port or 0, replica, calls)
                print(f"memory of the gateway before  {bench.memory_mb:5.1f} MB")
                await bench.until_served(keys[0])
                for stream in (False, True):
                    await bench.warm(keys[:WARM], stream)
                for stream in (False, True):
                    for concurrency in (1, 32, 256):
                        await bench.at(concurrency, keys, stream)
                print(f"memory of the gateway after   {bench.memory_mb:5.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1024, help="for each line")
    parser.add_argument("--durability", choices=("process", "power"), default="process", help="as of `bombus up`")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        arguments = parser.parse_args()
        runner.run(run(arguments.calls, arguments.durability))


if __name__ == "__main__":
    main()
