"""A hive for tests of model calls: real bus, coordinator and gateway, and a replica that tests script.

Scripts send frame by frame, so that tests can force chunk borders, disconnects and crashes.
"""

import asyncio
import json
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from bombus.bus import Blobs, Bus
from bombus.bus.follow import Follower
from bombus.config.documents import parse_job
from bombus.errors import BusUnavailable
from bombus.hive import inbox
from bombus.hive.events import EpisodeType, NotedCall, Weights
from bombus.hive.generation import Fault, Finished, Frame, Generate, Tokens, decode_request, encode_frame
from bombus.hive.records import CallRecord, decode_record, pack_logprobs, pack_tokens, unpack_tokens
from bombus.hive.state import EngineState, Phase
from bombus.machine.process import listen
from bombus_coordinator.shell import Coordinator
from bombus_gateway.app import create_app
from bombus_gateway.call.workers import INLINE_BYTES_MAX, THREADS, Workers
from bombus_gateway.context import Gateway
from bombus_gateway.keys import Keys
from bombus_gateway.service import serving
from bombus_gateway.settings import GatewaySettings
from bombus_gateway.text.rendering import TextModel, TextOptions
from tests.patience import PATIENCE_S

ENGINE = "main"
MODEL = "models/bumble"
BEAT_S = 2.0  # of the 10 s after which a replica that is not heard from is gone
SECRET = b"a secret for tests of 32 bytes!!"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a bee<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Opens a thought for the model, as the templates of thinking models do.
THINKING_TEMPLATE = TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}{# </think> #}")
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the weather is fine today",
    'what is the weather in Paris? {"name": "weather", "arguments": {"city": "Paris"}}',
    "<tool_call> </tool_call> <tool_response> user assistant system hello there how are you",
] * 4


def small_tokenizer() -> dict[str, bytes]:
    """Train a byte-level BPE tokenizer with a ChatML template, and return its files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = [AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
        "config.json": json.dumps({"max_position_embeddings": 2048, "vocab_size": 420}).encode(),
    }


FILES = small_tokenizer()
TEXT = TextModel(FILES, MODEL, TextOptions(tools="hermes"))
IM_END = TEXT.tokenizer.token_id("<|im_end|>") or 0


def tokens_of(text: str, end: bool = True) -> list[int]:
    """Return the tokens of `text` as this model would sample it."""
    return TEXT.tokenizer.encode(text) + ([IM_END] if end else [])


Send = Callable[[Frame], Awaitable[None]]
Script = Callable[[Generate, Send], Coroutine[None, None, None]]


def says(*texts: str | Sequence[int], version: int = 0, portion: int = 0, finish: str = "stop") -> Script:
    """Return a script that sends one completion for each text, `portion` tokens to a frame (0: all in one).

    As any replica, it ends each at the number of tokens that the request allows.
    """

    async def script(request: Generate, send: Send) -> None:
        for choice, text in enumerate(texts):
            tokens = tokens_of(text, finish == "stop") if isinstance(text, str) else list(text)
            allowed = request.sampling.max_tokens or len(tokens)
            size = portion or max(1, len(tokens))
            for start in range(0, min(allowed, len(tokens)), size):
                part = tokens[start : min(allowed, start + size)]
                await send(frame_of(part, choice, version, request.sampling.top_logprobs))
            reason = "length" if len(tokens) > allowed else finish
            await send(Finished(choice=choice, reason=reason, cached_prompt_tokens=7))

    return script


def frame_of(tokens: Sequence[int], choice: int = 0, version: int = 0, top: int = 0) -> Tokens:
    """Return a frame in which the logprob of a token is -id/1000, so that a test can tell them apart."""
    return Tokens(
        choice=choice,
        version=version,
        tokens=pack_tokens(tokens),
        logprobs=pack_logprobs([-token / 1000 for token in tokens]),
        top=tuple(tuple((token + k, -(token + k) / 1000) for k in range(top)) for token in tokens) if top else (),
    )


async def lacks_adapter(request: Generate, send: Send) -> None:
    """Refuse as a replica does that does not have the adapter."""
    await send(Fault(why=f"this replica does not have adapter {request.adapter}: load it first", code="unknown_model"))


class Died(Exception):
    """Raised by a script to break the replica's connection."""


class ScriptedReplica:
    """A server of `POST /generate` (generation.py). Each request takes the next of `scripts`, or `otherwise`.

    It has the `adapters` that it was sent, by their addresses: where they were. It lets in who has its `key`, as a
    replica does.
    """

    def __init__(self) -> None:
        self.scripts: deque[Script] = deque()
        self.otherwise: Script = says("ok")
        self.requests: list[Generate] = []
        self.adapters: dict[str, str] = {}
        self.aborted = asyncio.Event()
        self.connections = 0
        self.key = Keys(SECRET).for_replicas
        self.url = ""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self.drop()
            await self._server.wait_closed()

    def drop(self) -> None:
        """Break all connections."""
        for writer in [*self._open]:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if b"content-length" in line]
                length = int(lengths[0]) if lengths else 0
                body = await reader.readexactly(length)
                if f"\r\nauthorization: Bearer {self.key}\r\n".encode() not in head:
                    refusal = msgspec.json.encode({"code": "bad_key", "why": "This replica answers its gateways."})
                    await respond(writer, b"401 Unauthorized", refusal)
                elif head.startswith(b"POST /adapters "):
                    await self._load_adapter(msgspec.json.decode(body), writer)
                else:
                    await self._answer(decode_request(body), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, Died):
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _load_adapter(self, place: dict[str, str], writer: asyncio.StreamWriter) -> None:
        if place["folder"].endswith("broken"):
            status, answer = b"400 Bad Request", {"code": "malformed", "why": "the adapter is damaged"}
        else:
            self.adapters[place["address"]] = place["folder"]
            status, answer = b"200 OK", {"address": place["address"]}
        await respond(writer, status, msgspec.json.encode(answer))

    async def _answer(self, request: Generate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(request)
        script = self.scripts.popleft() if self.scripts else self.otherwise
        if request.adapter and request.adapter not in self.adapters:
            script = lacks_adapter
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

        async def send(frame: Frame) -> None:
            if writer.is_closing():
                raise Died
            data = encode_frame(frame)
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()

        running = asyncio.create_task(script(request, send))
        gone = asyncio.create_task(reader.read(1))
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            self.aborted.set()
            raise Died
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        await running
        if not writer.is_closing():
            writer.write(b"0\r\n\r\n")
            await writer.drain()


async def respond(writer: asyncio.StreamWriter, status: bytes, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
    await writer.drain()


class GatewayHive:
    """One engine that is rolling, its replicas, and any number of gateways."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.replica = ScriptedReplica()
        self.replicas = [self.replica]
        self.follower = Follower(bus)
        self.epoch = 0
        self.base_url = ""
        self.gateway: Gateway | None = None
        self.clients: list[AsyncOpenAI] = []
        self.leading: asyncio.Task[None] | None = None
        self._alive: dict[str, inbox.ReplicaAlive] = {}  # what each replica has said last

    @property
    def engine(self) -> EngineState:
        return self.follower.hive.engine(ENGINE)

    async def until(self, holds: Callable[[EngineState], bool]) -> None:
        await self.follower.wait_for(lambda _: holds(self.engine), PATIENCE_S)

    async def start(self, job: dict[str, Any], files: Mapping[str, bytes] = FILES) -> None:
        """Configure, start and boot the engine, until it is ROLLING with one replica. `files` are its model's."""
        config = parse_job(job)
        await self.bus.inbox.request(config.to_command(new_id(), ENGINE))
        begins = REGISTERS if config.to_collection().episode_groups else inbox.Start(id=new_id(), engine=ENGINE)
        await self.bus.inbox.request(begins)
        await self.until(lambda engine: engine.run > 0)
        answer = await self.bus.inbox.request(
            inbox.TrainerOpens(id=new_id(), engine=ENGINE, run=self.engine.run, trainer="t1")
        )
        assert isinstance(answer, inbox.Done)
        self.epoch = answer.epoch
        await Blobs(self.bus).put("tokenizer-1", msgspec.msgpack.encode(files))
        await self.bus.inbox.send(
            inbox.WeightsSaved(
                id=new_id(),
                engine=ENGINE,
                run=self.engine.run,
                step=0,
                trainer_epoch=self.epoch,
                weights=Weights(where="nowhere", tokenizer="tokenizer-1"),
            )
        )
        await self.replica.start()
        await self.alive("replica-1", self.replica)
        await self.until(lambda engine: engine.phase == Phase.ROLLING)

    async def alive(self, name: str, replica: ScriptedReplica, version: int = 0, *, constrains: bool = False) -> None:
        run = self.engine.run
        message = inbox.ReplicaAlive(
            id=new_id(),
            engine=ENGINE,
            replica=name,
            url=replica.url,
            run=run,
            version=version,
            constrains=constrains,
        )
        self._alive[name] = message
        await self.bus.inbox.send(message)
        await self.until(lambda engine: name in engine.replicas and engine.replicas[name].version == version)

    async def replica_leaves(self, name: str) -> None:
        del self._alive[name]
        await self.bus.inbox.send(inbox.ReplicaLeaves(id=new_id(), engine=ENGINE, replica=name))
        await self.until(lambda engine: name not in engine.replicas)

    async def keep_replicas(self) -> None:
        """Say again and again that the replicas are alive, so that none is taken for gone in a slow test."""
        while True:
            await asyncio.sleep(BEAT_S)
            for message in list(self._alive.values()):
                with suppress(BusUnavailable):
                    await self.bus.inbox.send(msgspec.structs.replace(message, id=new_id()))

    async def stop_coordinator(self) -> None:
        """Stop the coordinator; no other takes over."""
        assert self.leading is not None
        self.leading.cancel()
        await asyncio.gather(self.leading, return_exceptions=True)

    async def another_replica(self, name: str, *, constrains: bool = False) -> ScriptedReplica:
        replica = ScriptedReplica()
        self.replicas.append(replica)
        await replica.start()
        await self.alive(name, replica, constrains=constrains)
        return replica

    async def claim(self, kind: EpisodeType = EpisodeType.TRAIN, owner: str = "") -> tuple[str, str]:
        """Claim an episode; return it and its key."""
        claim = inbox.Claim(id=new_id(), engine=ENGINE, claim=new_id(), client="c1", type=kind, wait_s=5.0, owner=owner)
        granted = await self.bus.inbox.request(claim)
        assert isinstance(granted, inbox.Granted)
        episode = granted.episodes[0]
        await self.bus.inbox.send(inbox.Touch(id=new_id(), engine=ENGINE, confirmed=(claim.claim,)))
        return episode, Keys(SECRET).sign(ENGINE, granted.run, episode, granted.claimed_ns + 3600 * 10**9)

    async def end(self, episode: str, reward: float = 1.0) -> None:
        result = inbox.EpisodeResult(episode=episode, task="t1", reward=reward)
        await self.bus.inbox.request(inbox.End(id=new_id(), engine=ENGINE, client="c1", results=(result,)))
        await self.until(lambda engine: episode not in engine.open)

    def client(self, key: str, base_url: str = "", **more: Any) -> AsyncOpenAI:
        client = AsyncOpenAI(base_url=(base_url or self.base_url) + "/v1", api_key=key, max_retries=0, **more)
        self.clients.append(client)
        return client

    async def calls(self, episode: str, count: int) -> list[NotedCall]:
        """Return the noted calls of an open episode, once there are `count`."""
        await self.until(lambda engine: len(engine.open[episode].calls) >= count)
        return list(self.engine.open[episode].calls)

    async def records(self, episode: str, count: int) -> list[CallRecord]:
        refs = [call.ref for call in await self.calls(episode, count)]
        stored = await self.bus.get_many(self.bus.subjects.calls_stream, [ref.seq for ref in refs])
        return [decode_record(found.data, ref) for found, ref in zip(stored, refs, strict=True)]


def chain_of(records: Sequence[CallRecord]) -> list[int]:
    """Rebuild the tokens of a chain of records, each of which must have the one before it as its parent."""
    tokens: list[int] = []
    for index, record in enumerate(records):
        if index:
            assert record.parent is not None
            assert record.parent.id == records[index - 1].id
            tokens += records[index - 1].choices[record.parent_choice].token_ids()
        else:
            assert record.parent is None
        tokens += unpack_tokens(record.prompt_tail)
        assert len(tokens) == record.prompt_tokens
    return tokens + records[-1].choices[0].token_ids()


def new_id() -> str:
    return uuid.uuid4().hex


@asynccontextmanager
async def gateway_of(
    bus: Bus, ready: bool = True, late: Follower | None = None, secret: bytes = SECRET, **settings: Any
) -> AsyncIterator[tuple[Gateway, str]]:
    """Run a gateway behind a real HTTP server; give it and its URL. One that is `late` is not waited for.

    Real replicas need the bus's own `secret`.
    """
    follower = late or Follower(bus)
    gateway = Gateway(
        settings=GatewaySettings(hive=bus.subjects.hive, **settings), bus=bus, follower=follower, keys=Keys(secret)
    )
    app = create_app(gateway)
    runs = (follower.run(), gateway.heartbeats.run(), app.calls.upstream.run())
    running = [asyncio.create_task(each) for each in runs]
    if late is None:
        await follower.caught_up(10)
    await app.calls.capacity.refresh()
    gateway.ready = ready
    with listen("127.0.0.1", 0) as bound:
        try:
            async with serving(app, bound):
                yield gateway, f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            app.calls.client.close()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


REGISTERS = inbox.RegisterTrainer(
    id="registers",
    engine=ENGINE,
    trainer="t1",
    batch_size=4,
    max_token_len=512,
    checkpoint_dir="",
    save_checkpoint_interval=0,
    starting_step=0,
    num_steps=10,
)
JOB: dict[str, Any] = {
    "bombus": {
        "model": {"path": MODEL, "tools": "hermes"},
        "rollout": {"max_prompt_length": 500, "max_response_length": 1500, "max_response_length_in_one_turn": 256},
    }
}


@asynccontextmanager
async def gateway_hive(
    bus: Bus, job: dict[str, Any] | None = None, files: Mapping[str, bytes] = FILES, **settings: Any
) -> AsyncIterator[GatewayHive]:
    """Run a hive with one gateway and one replica while the block runs. `files` are the model's."""
    hive = GatewayHive(bus)
    coordinator = Coordinator(bus)
    hive.leading = asyncio.create_task(coordinator.lead())
    running = [hive.leading, asyncio.create_task(hive.follower.run())]
    try:
        await asyncio.wait_for(coordinator.leading.wait(), PATIENCE_S)
        await hive.start(job or JOB, files)
        running.append(asyncio.create_task(hive.keep_replicas()))
        async with gateway_of(bus, **settings) as (gateway, url):
            hive.gateway, hive.base_url = gateway, url
            yield hive
            for client in hive.clients:
                await client.close()
    finally:
        for replica in hive.replicas:
            await replica.stop()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@contextmanager
def every_thread_busy(workers: Workers) -> Iterator[None]:
    """Keep the threads for large requests busy while the block runs."""
    may_end = threading.Event()
    work = partial(may_end.wait, PATIENCE_S)
    busy = [asyncio.create_task(workers.run(f"busy-{n}", INLINE_BYTES_MAX + 1, work)) for n in range(THREADS)]
    try:
        yield
        assert not any(each.done() for each in busy)
    finally:
        may_end.set()


def fault(why: str) -> Script:
    async def script(request: Generate, send: Send) -> None:
        await send(Fault(why=why, retry=True))

    return script
