"""The least that a call can cost a gateway with these libraries: its CPU with everything of ours left out.

A FastAPI route reads a request, decodes a chat, calls the scripted replica of `bench.gateway`, stores two messages as
large as a call's record and its notice, waits for both acknowledgements, and answers. No key is checked, nothing is
rendered, parsed or merged. `python -m bench.gateway` gives the whole beside it.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response

from bench.gateway import ANSWER, PROMPT, TOKENS, Bench
from bench.scripted import scripted_replica
from bombus import AsyncSwarmClient, Job
from bombus.bus import Bus
from bombus.demo import hive
from bombus.hive.generation import Generate
from bombus.hive.records import SamplingParams, pack_tokens
from bombus.machine.process import free_port, loop_factory
from bombus_gateway.call.replica_client import ReplicaClient

RECORD = bytes(1100)  # of a call with 64 tokens
NOTICE = bytes(250)


class _Message(msgspec.Struct):
    role: str
    content: str


class _Chat(msgspec.Struct):
    model: str
    messages: list[_Message]
    max_tokens: int
    stream: bool = False


async def serve(nats: str, replica: int, port: int) -> None:
    """Answer `POST /v1/chat/completions` with what no gateway could leave out."""
    app, client = FastAPI(), ReplicaClient("")
    read, write = msgspec.json.Decoder(_Chat), msgspec.json.Encoder()
    async with await Bus.connect(nats, "main") as bus:
        subject = bus.subjects.call("main", "")

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> Response:
            chat = read.decode(await request.body())
            sampling = SamplingParams(max_tokens=chat.max_tokens)
            asked = Generate(id="b", engine="main", run=1, prompt=pack_tokens(PROMPT), sampling=sampling, stream=False)
            generation = await client.generate(f"http://127.0.0.1:{replica}", asked, check=lambda frame: None)
            while await generation.frames():
                pass
            for body in (RECORD, NOTICE):
                await bus.publisher.publish(subject, body, msg_id=os.urandom(16).hex(), timeout_s=10)
            choice = {"index": 0, "message": {"role": "assistant", "content": "a" * TOKENS}, "finish_reason": "length"}
            return Response(write.encode({"id": "c", "choices": [choice]}), media_type="application/json")

        config = uvicorn.Config(app, port=port, log_level="warning", access_log=False)
        await uvicorn.Server(config).serve()


async def run(calls: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with hive.running(Path(folder), threads=1) as url, AsyncSwarmClient(url) as swarm:
            await swarm.auto_sync_train_config_and_start_engine(Job(model="tiny", batch_size=2, num_repeat=2))
            nats, port = (Path(folder) / "hive/nats-url").read_text().strip(), free_port()
            async with await Bus.connect(nats, "main") as bus, scripted_replica(bus, "main", [ANSWER]) as replica:
                command = [sys.executable, "-m", "bench.floor", "--serve", nats, str(replica), str(port)]
                process = subprocess.Popen(command)
                try:
                    await _until_listening(port)
                    bench = Bench(port, replica, calls)
                    bench.pid = process.pid
                    await bench.warm(["floor"] * 64, stream=False)
                    for concurrency in (1, 32, 256):
                        await bench.at(concurrency, ["floor"] * 256, stream=False)
                finally:
                    process.terminate()
                    process.wait()


async def _until_listening(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                return writer.close()
            except OSError:
                await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1024, help="for each line")
    parser.add_argument("--serve", nargs=3, metavar=("NATS", "REPLICA", "PORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if arguments.serve:
            nats, replica, port = arguments.serve
            runner.run(serve(nats, int(replica), int(port)))
        else:
            runner.run(run(arguments.calls))


if __name__ == "__main__":
    main()
