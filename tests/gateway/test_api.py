"""An API of another dialect, made here of `call/` alone: nothing in `call/` has to change for the next one."""

from collections.abc import AsyncIterator, Sequence

import httpx
import msgspec
import pytest

from bombus.errors import Code, Refused
from bombus.hive.generation import Generate
from bombus.hive.records import unpack_tokens
from bombus.machine.host_names import HeaderPair
from bombus_gateway.access import EpisodeGuard, HeaderMap
from bombus_gateway.call.api import ParsedRequest, call_route
from bombus_gateway.call.calls import AnswerHead, Calls
from bombus_gateway.call.completion import Completion, CompletionDelta, Usage
from bombus_gateway.call.prefixes import NOTHING_READ, BodyPrefix
from bombus_gateway.call.request import CompletionRequest, InvalidField, RequestedSampling
from tests.gateway.openai_hive import ENGINE, Died, GatewayHive, Send, frame_of, says, tokens_of


class Body(msgspec.Struct, forbid_unknown_fields=True):
    say: str
    until: tuple[str, ...] = ()
    top_p: float = 1.0
    live: bool = False


class PlainDialect:
    """Text in, text out, one choice."""

    name = b"plain"

    def read(self, body: bytes, headers: HeaderMap, before: BodyPrefix = NOTHING_READ) -> ParsedRequest:
        try:
            found = msgspec.json.decode(body, type=Body)
        except msgspec.MsgspecError as error:
            raise Refused(Code.MALFORMED, str(error)) from error
        message = {"role": "user", "content": found.say}
        request = CompletionRequest(
            chat=True,
            messages=(message,),
            stops=found.until,
            sampling=RequestedSampling(top_p=found.top_p),
            stream=found.live,
        )
        return ParsedRequest(request, PlainEncoder)

    def error(self, error: Refused) -> bytes:
        return f"no: {error.field if isinstance(error, InvalidField) else error.code}".encode()

    def error_event(self, error: Refused) -> bytes:
        return b"|no more"


class PlainEncoder:
    headers: Sequence[HeaderPair] = ()

    def __init__(self, head: AnswerHead) -> None:
        self.head = head

    def whole(self, completions: Sequence[Completion], usage: Usage) -> bytes:
        return f"{completions[0].text()} ({usage.completion})".encode()

    def opening(self) -> bytes:
        return f"{self.head.prompt_tokens}>".encode()

    def beat(self) -> bytes:
        return b"|"

    def progress(self, completion: Completion, delta: CompletionDelta) -> bytes:
        return "".join(f"|{part.text}" for part in delta.deltas if hasattr(part, "text")).encode()

    def closing(self, completion: Completion) -> bytes:
        return f"|{completion.finish} {completion.stop}".encode()

    def end(self, usage: Usage) -> bytes:
        return b"|."


@pytest.fixture
async def api(served: GatewayHive) -> AsyncIterator[httpx.AsyncClient]:
    gateway = served.gateway
    assert gateway is not None
    calls = Calls(gateway)
    app = call_route(calls, PlainDialect(), EpisodeGuard(gateway.keys, ENGINE, any_engine=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        yield client
    calls.client.close()


async def test_another_api_samples_records_and_gives_a_retry_the_recorded_answer(
    served: GatewayHive, api: httpx.AsyncClient
) -> None:
    episode, key = await served.claim()
    served.replica.scripts += [says("the fox"), says("another")]
    first = await api.post("/", json={"say": "hello"}, headers={"x-api-key": key})
    assert first.text == f"the fox ({len(tokens_of('the fox'))})"
    again = await api.post("/", json={"say": "hello"}, headers={"x-api-key": key, "x-stainless-retry-count": "1"})
    assert again.text == first.text
    (record,) = await served.records(episode, 1)
    assert record.choices[0].message == {"role": "assistant", "content": "the fox"}
    assert record.messages == ({"role": "user", "content": "hello"},)


async def test_another_api_streams_in_its_own_form(served: GatewayHive, api: httpx.AsyncClient) -> None:
    _, key = await served.claim()
    served.replica.scripts.append(says("the fox jumps", portion=1))
    body = {"say": "hello", "until": [" jump"], "live": True}
    streamed = await api.post("/", json=body, headers={"x-api-key": key})
    opening, _, text = streamed.text.partition(">")
    assert int(opening) == len(unpack_tokens(served.replica.requests[0].prompt))
    assert text.endswith("|stop  jump|.")
    assert text.removesuffix("|stop  jump|.").replace("|", "") == "the fox"


async def test_another_api_refuses_in_its_own_form(served: GatewayHive, api: httpx.AsyncClient) -> None:
    _, key = await served.claim()
    for body, sent, status, text in (
        ({"say": "hello"}, "nothing", 401, "no: bad_key"),
        ({"shout": "hello"}, key, 400, "no: malformed"),
        ({"say": "hello " * 900}, key, 400, "no: messages"),
    ):
        refused = await api.post("/", json=body, headers={"x-api-key": sent})
        assert (refused.status_code, refused.text) == (status, text)
    assert (await api.get("/")).status_code == 405

    async def breaks_off(request: Generate, send: Send) -> None:
        await send(frame_of(tokens_of("the quick", end=False)))
        raise Died

    served.replica.scripts.append(breaks_off)
    broken = await api.post("/", json={"say": "hello", "live": True}, headers={"x-api-key": key})
    assert broken.text.partition(">")[2] == "|the quick|no more"
