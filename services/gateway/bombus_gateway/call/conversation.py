"""An episode as a tree of messages, to find the stored conversation that a request extends. Pure.

A conversation is named by a chain of digests, one for each prefix of its messages. The longest stored prefix of a
request is found by looking up its digests from the last to the first.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from bombus.hive.records import DIGEST_BYTES, CallRecord, CallRef, CallStatus
from bombus_gateway.text.message import ChatMessage

EXACT_MAX = 2.0**53  # up to this, a float has every whole number

_encode = msgspec.msgpack.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


class Node(msgspec.Struct, frozen=True, gc=False):
    """A conversation that ends with a sampled message.

    `tokens` (int32) has its prompt and, from token number `completion_at` on, its completion. `sampled` counts the
    tokens of all its completions, this one and those that it continues.
    """

    ref: CallRef
    choice: int
    tokens: bytes
    completion_at: int = 0
    digest: bytes = b""  # of all its messages; empty for a plain completion, which has none
    sampled: int = 0
    reasoning: bytes = b""  # the digest of the message's reasoning


def root_digest(tools: Sequence[Mapping[str, Any]], variables: Mapping[str, bool | int | float | str]) -> bytes:
    """Return the digest that a conversation's chain begins with: that of its tools, and of the template's variables.

    So a conversation is only continued with the variables with which it was rendered.
    """
    if variables:
        return blake2b(_encode_sorted({"tools": tools, "variables": variables}), digest_size=DIGEST_BYTES).digest()
    return blake2b(_encode_sorted(tools), digest_size=DIGEST_BYTES).digest() if tools else b""


def next_digest(before: bytes, message: ChatMessage) -> bytes:
    """Return the digest of a conversation that is longer by `message`.

    Ids of tool calls, the formatting of their arguments, reasoning and an assistant's name do not change the digest:
    harnesses make their own ids, formatting and names, and leave reasoning out.
    """
    calls = message.get("tool_calls") or ()
    content = (
        message["role"],
        message.get("content") or "",
        (message.get("name") or "") if message["role"] != "assistant" else "",
        [(call["function"]["name"], _normalized(call["function"]["arguments"])) for call in calls],
    )
    return blake2b(before + _encode(content), digest_size=DIGEST_BYTES).digest()


def reasoning_digest(message: ChatMessage) -> bytes:
    """Return the digest of a message's reasoning, which tells answers apart that are otherwise equal."""
    return blake2b((message.get("reasoning_content") or "").encode(), digest_size=DIGEST_BYTES).digest()


def prefix_digests(root: bytes, messages: Sequence[ChatMessage]) -> list[bytes]:
    """Return a digest for each message; digest k is that of the first k + 1 messages."""
    digests: list[bytes] = []
    for message in messages:
        root = next_digest(root, message)
        digests.append(root)
    return digests


def _normalized(arguments: str) -> bytes | str:
    try:
        return _encode_sorted(_whole(msgspec.json.decode(arguments)) if arguments.strip() else {})
    except (msgspec.DecodeError, RecursionError):  # not JSON, or nested too deeply
        return arguments


def _whole(value: Any) -> Any:
    """Return a value of JSON with whole numbers as integers: 1.0 is 1 in JavaScript, which echoes it so."""
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < EXACT_MAX else value


class Conversation:
    """The calls of one episode, as far as this gateway knows them."""

    def __init__(self) -> None:
        self.bytes = 1000  # roughly the memory that it takes, without calls too
        self.stored_bytes = 0  # of the records of its calls in the log, as far as this gateway wrote or read them
        self.answers: dict[bytes, CallRef] = {}  # by request digest; the latest, which is the one that a retry repeats
        self.not_ours: set[bytes] = set()  # digests that the log does not have: the harness wrote these messages
        self._nodes: dict[bytes, list[Node]] = {}  # equal answers, in the order of the log
        self._plain: list[Node] = []
        self._by_call: dict[tuple[int, int], Node] = {}  # (sequence, choice)

    def knows(self, ref: CallRef) -> bool:
        return (ref.seq, -1) in self._by_call or (ref.seq, 0) in self._by_call

    def prompt_of(self, ref: CallRef) -> bytes:
        """Return the whole prompt (int32) of a call that is known here."""
        node = self._by_call[ref.seq, 0]
        return node.tokens[: 4 * node.completion_at]

    def longest(self, digests: Sequence[bytes], messages: Sequence[ChatMessage]) -> tuple[int, Node] | None:
        """Return the longest stored prefix of a request: how many of its messages, and the node they end with.

        Of equal answers it is the one with the reasoning that the request has, else the first.
        """
        for count in range(len(digests), 0, -1):
            nodes = self._nodes.get(digests[count - 1])
            if nodes is not None:
                reasoning = reasoning_digest(messages[count - 1]) if len(nodes) > 1 else b""
                return count, next((node for node in nodes if node.reasoning == reasoning), nodes[0])
        return None

    def longest_tokens(self, prompt: bytes) -> Node | None:
        """Return the plain completion whose tokens are the longest stored prefix of `prompt` (int32)."""
        fitting = [node for node in self._plain if prompt.startswith(node.tokens)]
        return max(fitting, key=lambda node: len(node.tokens), default=None)

    def add(self, ref: CallRef, record: CallRecord, prompt: bytes, before: bytes) -> None:
        """Add a recorded call with its whole `prompt` (int32) and the digest of all messages `before` its answer.

        Of two answers that are equal with their reasoning the first one is continued, so that a conversation that is
        rebuilt from the log is the same.
        """
        if self.knows(ref):
            return
        # A call that was cut off has no answer to continue.
        complete = record.status == CallStatus.COMPLETE
        parent = self._by_call.get((record.parent.seq, record.parent_choice)) if record.parent is not None else None
        before_it = parent.sampled if parent is not None else 0
        for index, choice in enumerate(record.choices if complete else ()):
            tokens = prompt + choice.tokens
            sampled = before_it + len(choice.tokens) // 4
            if choice.message is None:
                node = Node(ref, index, tokens, len(prompt) // 4, sampled=sampled)
                self._plain.append(node)
            else:
                reached, reasoning = next_digest(before, choice.message), reasoning_digest(choice.message)
                node = Node(ref, index, tokens, len(prompt) // 4, reached, sampled, reasoning)
                self._nodes.setdefault(reached, []).append(node)
            self._by_call[ref.seq, index] = node
            self.bytes += len(tokens) + 500
        if not complete:
            self._by_call[ref.seq, -1] = Node(ref, -1, b"")
        elif record.request_digest:
            self.answers[record.request_digest] = ref

    def add_stored(self, ref: CallRef, record: CallRecord) -> None:
        """Add a call that was read from the log. Raises `KeyError` unless its parent was added before."""
        if record.parent is None:
            before, tokens = root_digest(record.tools, record.chat_template_kwargs), b""
        else:
            parent = self._by_call[record.parent.seq, record.parent_choice]
            before, tokens = parent.digest, parent.tokens
        digests = prefix_digests(before, record.messages)
        self.add(ref, record, tokens + record.prompt_tail, digests[-1] if digests else before)
