"""Digests that identify messages and conversations. Pure.

A conversation is identified by a chain of digests, one for each prefix of its messages. Harnesses change ids,
formatting and names, and omit reasoning; none of this changes a digest.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from bombus.hive.records import DIGEST_BYTES
from bombus_gateway.text.message import ChatMessage

EXACT_MAX = 2.0**53  # floats represent every whole number exactly up to here
TOOLS_KEPT = 64  # maximum number of tool lists whose digest is kept
TOOLS_BYTES_MAX = 128 << 10  # maximum size of such a list as JSON

_encode = msgspec.msgpack.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
# Digests of tools, by the tools' ids: the requests of a job share the objects. Keeping the tools here keeps the ids
# valid.
_kept: dict[tuple[int, ...], tuple[Sequence[Mapping[str, Any]], bytes]] = {}


def root_digest(
    tools: Sequence[Mapping[str, Any]], variables: Mapping[str, bool | int | float | str], shared: bool = False
) -> bytes:
    """Return the digest with which a conversation's chain begins. It covers the tools and the template's variables.

    A conversation is therefore continued only with the tools and variables with which it was rendered. `shared` means
    that other requests use the same tool objects, so the digest of these is computed only once.
    """
    digest = b""
    if tools:
        digest = _digest_of_shared(tools) if shared else _digest(_encode_sorted(tools))
    return _digest(digest + _encode_sorted(variables)) if variables else digest


def _digest_of_shared(tools: Sequence[Mapping[str, Any]]) -> bytes:
    ids = tuple(map(id, tools))
    kept = _kept.get(ids)
    if kept is not None:
        return kept[1]
    text = _encode_sorted(tools)
    digest = _digest(text)
    if len(text) <= TOOLS_BYTES_MAX:
        if len(_kept) >= TOOLS_KEPT:
            _kept.clear()
        _kept[ids] = tuple(tools), digest
    return digest


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=DIGEST_BYTES).digest()


def next_digest(before: bytes, message: ChatMessage) -> bytes:
    """Return the digest of the conversation with digest `before`, extended by `message`.

    Ids of tool calls, the formatting of their arguments, reasoning and an assistant's name do not change the digest.
    """
    content = (
        message["role"],
        message.get("content") or "",
        (message.get("name") or "") if message["role"] != "assistant" else "",
        named_calls(message),
    )
    return blake2b(before + _encode(content), digest_size=DIGEST_BYTES).digest()


def words_digest(before: bytes, words: str, message: ChatMessage) -> bytes:
    """Return the digest of the conversation with digest `before`, followed by an answer's words and tool calls."""
    return blake2b(before + _encode((words, named_calls(message))), digest_size=DIGEST_BYTES).digest()


def reasoning_digest(message: ChatMessage) -> bytes:
    """Return the digest of a message's reasoning, which distinguishes answers that are otherwise equal."""
    return blake2b((message.get("reasoning_content") or "").encode(), digest_size=DIGEST_BYTES).digest()


def call_ids(message: ChatMessage) -> list[str]:
    """Return the ids of the calls that a message makes."""
    return [call["id"] for call in message.get("tool_calls") or ()]


def named_calls(message: ChatMessage) -> list[tuple[str, bytes | str]]:
    """Return the name and the normalized arguments of each call that a message makes."""
    calls = message.get("tool_calls") or ()
    return [(call["function"]["name"], _normalized(call["function"]["arguments"])) for call in calls]


def words_of(message: ChatMessage) -> str:
    """Return the text of a message with each run of white space replaced by one space."""
    return " ".join((message.get("content") or "").split())


def _normalized(arguments: str) -> bytes | str:
    """Return arguments as normalized JSON, or unchanged if they are not JSON. Empty text, null and `{}` are equal."""
    try:
        value = _whole(msgspec.json.decode(arguments)) if arguments.strip() else {}
        return _encode_sorted({} if value is None else value)
    except (msgspec.DecodeError, RecursionError):  # not JSON, or nested too deeply
        return arguments


def _whole(value: Any) -> Any:
    """Return a JSON value in which floats without a fraction are integers, since JavaScript harnesses echo 1.0 as 1."""
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < EXACT_MAX else value
