import asyncio

import pytest
from nats.errors import BadSubjectError, ConnectionClosedError

from bombus.bus.lean_nats import LeanClient
from tests.patience import PATIENCE_S

HEADERS = {"Nats-Msg-Id": "a1", "Bombus-Reply": "_INBOX.é.1"}


class Recording(LeanClient):
    """Keeps what is sent to the server."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.errors: list[Exception] = []

    async def note(self, error: Exception) -> None:
        self.errors.append(error)

    async def _send_command(self, cmd: bytes, priority: bool = False) -> None:
        self.sent.append(cmd)
        await super()._send_command(cmd, priority)


async def connected(url: str) -> Recording:
    client = Recording()
    await client.connect(url, error_cb=client.note)
    return client


@pytest.mark.parametrize("more", [{}, {"traceparent": "a\r\nPUB other 1\r\nx"}, {"traceparent": "\n"}])
async def test_the_short_way_sends_the_bytes_that_nats_py_would_send(nats_url: str, more: dict[str, str]) -> None:
    client = await connected(nats_url)
    headers = HEADERS | more
    client.sent.clear()
    await client.publish_short("a.b", b"body\r\n", "_INBOX.x.7", headers)
    await client.publish("a.b", b"body\r\n", "_INBOX.x.7", headers)
    short, long = client.sent
    assert short == long
    await client.close()


async def test_a_message_of_the_short_way_arrives_with_its_headers_and_is_counted(nats_url: str) -> None:
    client = await connected(nats_url)
    received = await client.subscribe("short.way")
    await client.publish_short("short.way", b"1", "_INBOX.x.7", HEADERS)
    message = await received.next_msg(PATIENCE_S)
    assert (message.data, message.reply, message.headers) == (b"1", "_INBOX.x.7", HEADERS)
    assert client.stats["out_msgs"] == 1
    await client.close()


@pytest.mark.parametrize("subject", ["a b", "a\r\nPUB x 0", "a\t", ""])
async def test_a_subject_that_would_be_another_command_is_refused(nats_url: str, subject: str) -> None:
    client = await connected(nats_url)
    for names in ((subject, "_INBOX.x"), ("a.b", subject or "a b")):
        with pytest.raises(BadSubjectError):
            await client.publish_short(names[0], b"1", names[1], HEADERS)
    await client.close()
    with pytest.raises(ConnectionClosedError):
        await client.publish_short("a.b", b"1", "_INBOX.x", HEADERS)


async def test_a_receiver_that_fails_is_told_of_and_gets_the_next_message(nats_url: str) -> None:
    client, got = await connected(nats_url), asyncio.Queue[tuple[str, bytes]]()

    def receive(subject: str, _reply: str, body: bytes, _head: bytes) -> None:
        if body == b"bad":
            raise ValueError(body)
        got.put_nowait((subject, body))

    await client.receive("direct.*", receive)
    for body in (b"bad", b"good"):
        await client.publish("direct.1", body)
    async with asyncio.timeout(PATIENCE_S):
        assert await got.get() == ("direct.1", b"good")
    assert [str(error) for error in client.errors] == ["b'bad'"]
    await client.close()
