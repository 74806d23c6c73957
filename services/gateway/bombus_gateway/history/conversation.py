"""An episode as a tree of messages, for finding the stored conversation that a request extends. Pure."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from bombus.hive.records import CallRecord, CallRef, CallStatus
from bombus_gateway.call.prefixes import EarlierBodies
from bombus_gateway.history.answers import Answers
from bombus_gateway.history.echoes import Followed, follow
from bombus_gateway.history.identity import reasoning_digest, root_digest
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.words import strings

_OVERHEAD_BYTES = 1500  # size of the objects of a message or an answer, besides its text
WALKS = 4  # maximum number of remembered requests, so that this many agents in an episode can alternate


class Node(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A conversation that ends with a sampled message, stored as its difference from the conversation that it continues
    (`parent`).

    `prompt_tail` and `completion` are int32; the completion starts at token `completion_at`. `sampled` counts the
    tokens of this completion and of all completions that it continues. `message` is the sampled message.
    """

    ref: CallRef
    choice: int
    prompt_tail: bytes = b""
    completion: bytes = b""
    completion_at: int = 0
    parent: "Node | None" = None
    digest: bytes = b""  # covers all the node's messages; empty for a plain completion, which has none
    sampled: int = 0
    reasoning: bytes = b""  # digest of the message's reasoning
    message: ChatMessage = {}

    @property
    def name(self) -> tuple[str, int]:
        """The id of the node's call, and the number of its choice."""
        return self.ref.id, self.choice

    @property
    def count(self) -> int:
        """The number of all tokens of the conversation."""
        return self.completion_at + len(self.completion) // 4

    @property
    def prompt(self) -> bytes:
        """The whole prompt (int32) of the node's call."""
        return (self.parent.tokens if self.parent is not None else b"") + self.prompt_tail

    @property
    def tokens(self) -> bytes:
        """All tokens of the conversation (int32). They are joined on each access: stored in each node, they would take
        quadratic memory."""
        pieces: list[bytes] = []
        node: Node | None = self
        while node is not None:
            pieces += (node.completion, node.prompt_tail)
            node = node.parent
        return b"".join(reversed(pieces))

    @property
    def memory_bytes(self) -> int:
        """Roughly the memory that the node takes without its parent."""
        return len(self.prompt_tail) + len(self.completion) + sum(map(len, strings(self.message))) + _OVERHEAD_BYTES


class _Walk(NamedTuple):
    """A matched request. It is kept because in a linear conversation each request begins with the previous request's
    messages."""

    root: bytes
    stops: tuple[str, ...]
    given: Sequence[ChatMessage]  # the request's settled messages
    followed: Followed[Node]  # the match, up to the end of `given`
    memory_bytes: int  # rough memory of the messages


class Conversation:
    """The calls of one episode, as far as this gateway knows them.

    `bodies` are the bodies of the latest requests for these calls. These bodies count toward the conversation's memory.
    """

    def __init__(self) -> None:
        self.stored_bytes = 0  # log bytes of the conversation's records, as far as this gateway wrote or read them
        self.bodies = EarlierBodies()
        self.answers: dict[bytes, list[CallRef]] = {}  # by request digest
        self.sampled = Answers[Node]()
        self._continued: set[tuple[int, int]] = set()  # answers that recorded calls continue
        self._continuing: Counter[tuple[int, int]] = Counter()  # answers that open calls continue
        self.continuing_count = 0  # how often an open call began to continue an answer
        self._plain: dict[tuple[int, int] | None, list[Node]] = {}  # plain completions, by what each continues
        self._by_call: dict[tuple[int, int], Node] = {}  # by (sequence, choice)
        self._walks: list[_Walk] = []  # never mutated, only replaced: threads iterate over it
        self._calls_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Roughly the memory that the conversation takes. The value is never 0, even without calls."""
        walks = sum(walk.memory_bytes for walk in self._walks)
        return _OVERHEAD_BYTES + self._calls_bytes + walks + self.bodies.memory_bytes

    @property
    def known(self) -> int:
        """The number of known answers plus the number of known calls without an answer. This sum never decreases."""
        return len(self._by_call)

    def knows(self, ref: CallRef) -> bool:
        return (ref.seq, -1) in self._by_call or (ref.seq, 0) in self._by_call

    def ref_of(self, call: str) -> CallRef | None:
        """Return the reference to the call with this id, if the call is known here."""
        return next((node.ref for node in reversed(self._by_call.values()) if node.ref.id == call), None)

    def answers_of(self, calls: Collection[str]) -> dict[str, ChatMessage]:
        """Return the first answer of each of these calls that is known here, by call id."""
        nodes = [node for node in self._by_call.values() if node.ref.id in calls]
        return {node.ref.id: node.message for node in nodes if node.choice == 0 and node.message}

    def prompt_of(self, ref: CallRef) -> bytes:
        """Return the whole prompt (int32) of a call that is known here."""
        return self._by_call[ref.seq, 0].prompt

    def follow(self, root: bytes, messages: Sequence[ChatMessage], stops: Collection[str] = ()) -> Followed[Node]:
        """Find the longest stored conversation with which a request begins. The conversation's digest chain must begin
        with `root`."""
        stops, walks = tuple(stops), self._walks
        walk = self._walk_to(root, messages, stops)
        followed = self._gone_on(walk, messages) if walk is not None else None
        if followed is None:
            followed = follow(self, root, messages, stops)
        if followed.settled.given:
            self._remember(walks, walk, _walked(root, messages, stops, followed, walk))
        return followed

    def follow_on(
        self, root: bytes, messages: Sequence[ChatMessage], stops: Collection[str], memory_bytes_max: int
    ) -> Followed[Node] | None:
        """Return the same result as `follow`, by continuing where the match of an earlier request stopped.

        Returns None if that is impossible, or if the messages that follow those of the earlier request take more memory
        than `memory_bytes_max`.
        """
        stops, walks = tuple(stops), self._walks
        walk = self._walk_to(root, messages, stops)
        if walk is None or _bytes_of(messages[len(walk.given) :]) > memory_bytes_max:
            return None
        followed = self._gone_on(walk, messages)
        if followed is not None and followed.settled.given:
            self._remember(walks, walk, _walked(root, messages, stops, followed, walk))
        return followed

    def _gone_on(self, walk: _Walk, messages: Sequence[ChatMessage]) -> Followed[Node] | None:
        """Continue matching where an earlier request stopped. Return None if that finds no further answer.

        The request then has to be matched from the start. Among several equal answers, this may now prefer a different
        one.
        """
        followed = follow(self, walk.root, messages, walk.stops, walk.followed)
        return None if followed.count == walk.followed.settled.count else followed

    def _remember(self, walks: list[_Walk], before: _Walk | None, new: _Walk) -> None:
        """Remember a request in place of the earlier request (`before`) that it continues.

        Do nothing if the walks have changed since `walks` was read, which can happen because large requests are matched
        in threads.
        """
        if self._walks is walks:
            self._walks = [*(each for each in walks if each is not before), new][-WALKS:]

    def is_continued(self, node: Node) -> bool:
        """Return whether any call, recorded or open, continues this answer."""
        key = node.ref.seq, node.choice
        return key in self._continued or key in self._continuing

    def is_call_continued(self, ref: CallRef) -> bool:
        """Return whether any call, recorded or open, continues an answer of this call."""
        return any(seq == ref.seq for seq, _ in (*self._continued, *self._continuing))

    def _walk_to(self, root: bytes, messages: Sequence[ChatMessage], stops: tuple[str, ...]) -> _Walk | None:
        """Among the earlier requests whose settled messages this request begins with, return the one with the most
        settled messages."""
        fitting = [
            walk
            for walk in self._walks
            if walk.root == root and walk.stops == stops and messages[: len(walk.given)] == walk.given
        ]
        return max(fitting, key=lambda walk: len(walk.given), default=None)

    def forget_walks(self) -> None:
        """Forget earlier requests, so that the next request is matched from its first message."""
        self._walks = []

    def begin_continuing(self, node: Node) -> None:
        """Mark an answer as continued until `end_continuing`, so that the next request is matched with another answer
        that is equal to it.

        Once the call is recorded, the answer stays marked.
        """
        self._continuing[node.ref.seq, node.choice] += 1
        self.continuing_count += 1

    def end_continuing(self, node: Node) -> None:
        """Undo one `begin_continuing`."""
        key = node.ref.seq, node.choice
        self._continuing[key] -= 1
        if not self._continuing[key]:
            del self._continuing[key]

    def longest_tokens(self, prompt: bytes) -> Node | None:
        """Return the plain completion whose tokens are the longest stored prefix of `prompt` (int32)."""
        longest: Node | None = None
        found = [(node, 0) for node in self._plain.get(None, ())]
        for node, at in found:  # grows while iterating: completions that continue a match are added
            own = node.prompt_tail + node.completion
            if prompt.startswith(own, at):
                longest = node if longest is None or node.count > longest.count else longest
                found += [(each, at + len(own)) for each in self._plain.get((node.ref.seq, node.choice), ())]
        return longest

    def add(self, ref: CallRef, record: CallRecord, parent: Node | None, before: bytes) -> None:
        """Add a recorded call that continues `parent`. `before` is the digest of all messages before the call's
        answer."""
        if self.knows(ref):
            return
        # A call that was cut off has no answer to continue.
        complete = record.status == CallStatus.COMPLETE
        if parent is not None:
            self._continued.add((parent.ref.seq, parent.choice))
        self._calls_bytes += sum(node.memory_bytes for node in self._unknown(parent)) + len(record.prompt_tail)
        for index, choice in enumerate(record.choices if complete else ()):
            made = partial(_node, ref, index, record, parent)
            if choice.message is None:
                node = made(b"")
                self._plain.setdefault((parent.ref.seq, parent.choice) if parent else None, []).append(node)
            else:
                node = self.sampled.add(before, choice.message, made)
            self._by_call[ref.seq, index] = node
            self._calls_bytes += node.memory_bytes - len(record.prompt_tail)  # shared by all choices
        if not complete:
            self._by_call[ref.seq, -1] = Node(ref, -1)
            self._calls_bytes += _OVERHEAD_BYTES
        elif record.request_digest:
            self.answers.setdefault(record.request_digest, []).append(ref)

    def _unknown(self, node: Node | None) -> Iterator[Node]:
        """Yield a node and the nodes that it continues, stopping at the first node whose call is known here."""
        while node is not None and not self.knows(node.ref):
            yield node
            node = node.parent

    def add_stored(self, ref: CallRef, record: CallRecord) -> None:
        """Add a call that was read from the log. Raises `KeyError` unless its parent was added before."""
        self.forget_walks()  # they may have missed this call
        if record.parent is None:
            parent, before = None, root_digest(record.tools, record.chat_template_kwargs)
        else:
            parent = self._by_call[record.parent.seq, record.parent_choice]
            before = parent.digest
        for message in record.messages:
            before = self.sampled.digest_with(before, message)
        self.add(ref, record, parent, before)


def _node(ref: CallRef, index: int, record: CallRecord, parent: Node | None, digest: bytes) -> Node:
    """Return the node for one choice of a call that continues `parent`. `digest` covers the whole conversation."""
    choice, message = record.choices[index], record.choices[index].message
    return Node(
        ref,
        index,
        record.prompt_tail,
        choice.tokens,
        record.prompt_tokens,
        parent,
        digest=digest,
        sampled=(parent.sampled if parent is not None else 0) + len(choice.tokens) // 4,
        reasoning=reasoning_digest(message) if message is not None else b"",
        message=message or {},
    )


def _walked(
    root: bytes,
    messages: Sequence[ChatMessage],
    stops: tuple[str, ...],
    followed: Followed[Node],
    before: _Walk | None,
) -> _Walk:
    """Return the walk to remember for a request. If its match continued the match of an earlier walk, `before` is that
    walk."""
    settled = followed.settled
    given, taken = messages[: settled.given], settled.taken
    outline = followed.outline.extended(followed.messages, taken)
    kept = Followed(followed.messages[:taken], followed.digests[:taken], settled=settled, outline=outline)
    if before is None or len(before.given) > len(given):
        return _Walk(root, stops, given, kept, _bytes_of(given))
    return _Walk(root, stops, given, kept, before.memory_bytes + _bytes_of(given[len(before.given) :]))


def _bytes_of(messages: Sequence[ChatMessage]) -> int:
    """Return roughly how much memory messages take."""
    return _OVERHEAD_BYTES * len(messages) + sum(map(len, strings(messages)))
