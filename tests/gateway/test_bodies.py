"""The gate of request bodies: what is too large or too deep is refused at every route before it is decoded."""

import asyncio
import gzip
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from bombus.bus import Bus
from bombus.errors import Code, Refused
from bombus_gateway import limits
from bombus_gateway.anthropic.request import MessagesBody, read_messages
from bombus_gateway.bodies import SMALL, SWARM, TRAINING, TRAJECTORIES, BodyGate, BodyLimits
from bombus_gateway.call.workers import THREADS, Workers
from bombus_gateway.decoding.json_body import BadParameter
from bombus_gateway.openai.request import ChatBody, read_chat
from bombus_gateway.responses.request import ResponsesBody, read_response_request
from tests.gateway.swarm_hive import PlayedHive, played_hive
from tests.gateway.test_access import routes_of
from tests.patience import PATIENCE_S

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# They look at no body. Every other route that takes one has to refuse it at the gate.
WITHOUT_BODY = {
    "/api/v1/client/config",
    "/api/v1/client/dynamic_config",
    "/api/v1/copy_weights",
    "/api/v1/sessions/{session}/project",
    "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}/publish",
    "/get_episode_buffer",
    "/resume_engine",
    "/sleep",
    "/start_engine",
    "/stop_engine",
    "/sync_train_code",
    "/v1/embeddings",
    "/wake_up",
}
LARGE = {  # routes whose bodies may be larger than what is decoded at once
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/end_episode",
    "/end_episodes",
    "/end_multi_model_episodes",
    "/sync_train_config",
    "/api/v1/forward",
    "/api/v1/forward_backward",
    "/api/v1/asample",
    "/generate",
    "/scored_data",
    "/scored_data_list",
}
DEEP = b'{"x": ' + b'[{"a": ' * 460 + b"1" + b"}]" * 460 + b"}"
WIDE = b'{"x": [' + b"1, " * 700_000 + b"1]}"
TURNS = 1000  # of the loop; a request that is answered on it takes some ten
GATE = BodyGate(Workers(), 8 << 20)


@pytest.fixture
async def played(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus) as played:
        yield played


async def answer(played: PlayedHive, path: str, receive: Callable[[], Any], **headers: str) -> tuple[int, bytes]:
    """Return how the app answers a POST with the key of an episode, without an HTTP client in between."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    key = played.gateway.keys.sign("main", 1, "main-1-1", 2**62)
    raw = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {key}".encode())]
    raw += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    where = re.sub(r"{\w+}", "x", path).replace("/x/x/ttl", "/weights/x/ttl")
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": where, "raw_path": where.encode()}
    scope |= {"root_path": "", "scheme": "http", "query_string": b"", "headers": raw, "server": ("127.0.0.1", 1)}
    scope["method"] = "PUT" if where.endswith(("/ttl", "/project")) else "POST"
    await played.app({**scope, "client": ("127.0.0.1", 2)}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def given(body: bytes) -> Callable[[], Any]:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    return receive


def of_clients_and_agents(played: PlayedHive) -> set[str]:
    """Return the paths of all routes that may be sent a body."""
    return {path for method, path in routes_of(played.app) if method in ("POST", "PUT") and path[:3] != "/e/"}


async def test_every_route_refuses_a_body_that_is_too_large_without_reading_it(played: PlayedHive) -> None:
    async def unread() -> Message:
        raise AssertionError("the body was read")

    routes = of_clients_and_agents(played) - WITHOUT_BODY
    assert routes > LARGE
    for path in routes:
        status, said = await answer(played, path, unread, content_length=f"{1 << 40}")
        assert (status, b"over the limit of" in said) == (413, True), (path, said)


async def test_every_route_refuses_a_body_that_is_too_deep(played: PlayedHive) -> None:
    for path in of_clients_and_agents(played) - WITHOUT_BODY:
        status, said = await answer(played, path, given(DEEP))
        assert (status, b"nested deeper than" in said) == (400, True), (path, said)


async def test_other_requests_go_on_while_a_large_body_is_read(played: PlayedHive) -> None:
    """Nothing of one is done on the loop: while all threads are busy, it waits, and the loop turns."""
    workers, may_end = played.gateway.workers, threading.Event()
    busy = [asyncio.create_task(workers.run(f"{turn}", 1 << 20, may_end.wait)) for turn in range(THREADS)]
    asked = {path: asyncio.create_task(answer(played, path, given(WIDE))) for path in LARGE}
    for _ in range(TURNS):
        await asyncio.sleep(0)
    done = [path for path, task in asked.items() if task.done()]
    may_end.set()
    await asyncio.gather(*busy)
    assert not done
    for path, task in asked.items():
        status, said = await task
        assert status < 500, (path, said)


# Every field of the bodies whose depth is checked field by field.
MESSAGES = [{"role": "user", "content": "hi"}]
FIELDS = [
    pytest.param(read, given, field.encode_name, id=f"{read.__name__}-{field.encode_name}")
    for read, kind, given in (
        (read_chat, ChatBody, {"messages": MESSAGES}),
        (read_messages, MessagesBody, {"messages": MESSAGES, "max_tokens": 1}),
        (read_response_request, ResponsesBody, {"input": "hi"}),
    )
    for field in msgspec.structs.fields(kind)
]


@pytest.mark.parametrize(("read", "given", "field"), FIELDS)
def test_what_is_too_deep_is_refused_in_each_field_and_what_is_just_not_is_not(
    read: Callable[[bytes], Any], given: dict[str, Any], field: str
) -> None:
    def body(depth: int) -> bytes:
        nested = b"[" * (depth - 2) + b'{"x":1}' + b"]" * (depth - 2)
        return msgspec.json.encode({"model": "m", **given, field: msgspec.Raw(nested)})

    with pytest.raises(Refused, match="nested deeper"):
        read(body(limits.DEPTH + 1))
    with suppress(BadParameter):  # most fields are no lists: that is said then
        read(body(limits.DEPTH))


# ---- the gate alone ----


async def passed(bounds: BodyLimits, body: bytes, decode: Callable[[bytes], Any] = len, **headers: str) -> Any:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return await GATE.decoded(named, given(body), bounds, decode, "turn")


@pytest.mark.parametrize("bounds", [GATE.calls, GATE.samples, SWARM, TRAINING, TRAJECTORIES])
async def test_a_large_body_is_decoded_while_the_loop_turns(bounds: BodyLimits) -> None:
    turned = threading.Event()
    decoding = asyncio.create_task(passed(bounds, b" " * (200 << 10), lambda _: turned.wait(PATIENCE_S)))
    for _ in range(3):
        await asyncio.sleep(0)
    turned.set()
    assert await decoding


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_few_bytes_that_are_a_large_body_are_one(encoding: str) -> None:
    packed = gzip.compress(WIDE) if encoding == "gzip" else zstd.compress(WIDE)
    here = threading.get_ident()
    assert len(packed) < TRAINING.inline_bytes
    assert await passed(TRAINING, packed, lambda _: threading.get_ident(), content_encoding=encoding) != here
    assert await passed(TRAINING, packed, content_encoding=encoding) == len(WIDE)
    with pytest.raises(Refused, match=r"limit|bytes") as refused:
        await passed(SMALL, packed, content_encoding=encoding)
    assert refused.value.code == Code.TOO_LARGE


@pytest.mark.parametrize(
    ("bounds", "body", "why"),
    [
        (TRAINING, b"[" + b"1," * limits.TRAINING_NUMBERS + b"1,1]", "more than 8388608 values; send less data"),
        (TRAINING, b"{" + b'"":1,' * limits.TRAINING_FIELDS + b'"":1}', "more than 262144 names; send less data"),
        (TRAINING, b"[" + b"[]," * limits.TRAINING_FIELDS + b"1]", "more than 262144 lists and objects; send less"),
        (TRAJECTORIES, b"[" + b"{}," * limits.TRAJECTORY_LISTS + b"1]", "more than 1048576 lists and objects; send"),
    ],
    ids=["numbers", "names", "lists", "groups"],
)
async def test_more_lists_names_or_values_than_a_route_takes_are_not_decoded(
    bounds: BodyLimits, body: bytes, why: str
) -> None:
    def decode(_: bytes) -> None:
        raise AssertionError("it was decoded")

    with pytest.raises(Refused, match=why):
        await passed(bounds, body, decode)
    text = b'["' + body.replace(b'"', b"") + b'"]'
    assert await passed(bounds, text) == len(text), "what is in a text is none of them"


async def test_a_body_is_counted_as_json_unless_the_route_takes_protobuf_and_it_says_so() -> None:
    for kind in ("application/x-protobuf", "application/x-protobuf; a=b"):
        assert await passed(TRAINING, DEEP, content_type=kind) == len(DEEP)
        with pytest.raises(Refused, match="deeper"):
            await passed(GATE.samples, DEEP, content_type=kind)
    with pytest.raises(Refused, match="deeper"):
        await passed(TRAINING, DEEP, content_type="application/json")


async def test_a_body_that_is_cut_off_or_has_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(Refused, match="cut off"):
        await GATE.decoded({}, _gone, SWARM, len, "turn")
    with pytest.raises(Refused, match="send zstd, gzip or none"):
        await passed(SWARM, b"{}", content_encoding="br")


async def _gone() -> Message:
    return {"type": "http.disconnect"}
