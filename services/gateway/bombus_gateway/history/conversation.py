"""An episode as a tree of messages, to find the stored conversation that a request extends. Pure."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

from bombus.hive.records import CallRecord, CallRef, CallStatus
from bombus_gateway.call.prefixes import EarlierBodies
from bombus_gateway.history.answers import Answers
from bombus_gateway.history.echoes import Followed, follow
from bombus_gateway.history.identity import reasoning_digest, root_digest
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.words import strings

_OVERHEAD_BYTES = 1500  # of the objects of a message or an answer, without its text
WALKS = 4  # requests that are remembered: as many agents of an episode may take turns


class Node(msgspec.Struct, frozen=True, eq=False):
    """A conversation that ends with a sampled message, as what it adds to the one that it continues (`parent`).

    `prompt_tail` and `completion` are int32; its prompt ends at token number `completion_at`. `sampled` counts the
    tokens of all its completions, this one and those that it continues. `message` is the one that was sampled.
    """

    ref: CallRef
    choice: int
    prompt_tail: bytes = b""
    completion: bytes = b""
    completion_at: int = 0
    parent: "Node | None" = None
    digest: bytes = b""  # of all its messages; empty for a plain completion, which has none
    sampled: int = 0
    reasoning: bytes = b""  # the digest of the message's reasoning
    message: ChatMessage = {}

    @property
    def name(self) -> tuple[str, int]:
        """The id of its call, and the number of its choice."""
        return self.ref.id, self.choice

    @property
    def count(self) -> int:
        """The number of all its tokens."""
        return self.completion_at + len(self.completion) // 4

    @property
    def prompt(self) -> bytes:
        """Its whole prompt (int32)."""
        return (self.parent.tokens if self.parent is not None else b"") + self.prompt_tail

    @property
    def tokens(self) -> bytes:
        """All its tokens (int32), joined anew each time: kept for each node they would grow with the turns' square."""
        pieces: list[bytes] = []
        node: Node | None = self
        while node is not None:
            pieces += (node.completion, node.prompt_tail)
            node = node.parent
        return b"".join(reversed(pieces))

    @property
    def memory_bytes(self) -> int:
        """Roughly the memory that it takes, without its parent."""
        return len(self.prompt_tail) + len(self.completion) + sum(map(len, strings(self.message))) + _OVERHEAD_BYTES


class _Walk(NamedTuple):
    """A request that was followed: each next one of a linear conversation begins with the messages of the last."""

    root: bytes
    stops: tuple[str, ...]
    given: Sequence[ChatMessage]  # those that are settled
    followed: Followed[Node]  # to the end of these
    memory_bytes: int  # roughly the memory that they take


class Conversation:
    """The calls of one episode, as far as this gateway knows them.

    `bodies` are the last ones that asked for them: they live as long, and take part of its memory.
    """

    def __init__(self) -> None:
        self.stored_bytes = 0  # of the records of its calls in the log, as far as this gateway wrote or read them
        self.bodies = EarlierBodies()
        self.answers: dict[bytes, list[CallRef]] = {}  # by request digest
        self.sampled = Answers[Node]()
        self._continued: set[tuple[int, int]] = set()  # the answers after which something was asked
        self._continuing: Counter[tuple[int, int]] = Counter()  # those that open calls continue
        self.continuing_count = 0  # how often an open call has continued one
        self._plain: dict[tuple[int, int] | None, list[Node]] = {}  # by the one that each continues
        self._by_call: dict[tuple[int, int], Node] = {}  # (sequence, choice)
        self._walks: list[_Walk] = []  # never changed, only replaced: threads look through it
        self._calls_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Roughly the memory that it takes, without calls too."""
        walks = sum(walk.memory_bytes for walk in self._walks)
        return _OVERHEAD_BYTES + self._calls_bytes + walks + self.bodies.memory_bytes

    @property
    def known(self) -> int:
        """The answers that are known here, and the calls without one. They only become more."""
        return len(self._by_call)

    def knows(self, ref: CallRef) -> bool:
        return (ref.seq, -1) in self._by_call or (ref.seq, 0) in self._by_call

    def ref_of(self, call: str) -> CallRef | None:
        """Return the place of a call that is known here, by its id."""
        return next((node.ref for node in reversed(self._by_call.values()) if node.ref.id == call), None)

    def answers_of(self, calls: Collection[str]) -> dict[str, ChatMessage]:
        """Return, by call id, the first answer of each call that is known here."""
        nodes = [node for node in self._by_call.values() if node.ref.id in calls]
        return {node.ref.id: node.message for node in nodes if node.choice == 0 and node.message}

    def prompt_of(self, ref: CallRef) -> bytes:
        """Return the whole prompt (int32) of a call that is known here."""
        return self._by_call[ref.seq, 0].prompt

    def follow(self, root: bytes, messages: Sequence[ChatMessage], stops: Collection[str] = ()) -> Followed[Node]:
        """Find the longest stored conversation with which a request begins, whose chain begins with `root`."""
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
        """Return what `follow` does by continuing after an earlier request, or None where that is impossible.

        Or where the messages that this request has more take more memory than `memory_bytes_max`.
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

        Of equal answers, the one that it goes on with may be another by now.
        """
        followed = follow(self, walk.root, messages, walk.stops, walk.followed)
        return None if followed.count == walk.followed.settled.count else followed

    def _remember(self, walks: list[_Walk], before: _Walk | None, new: _Walk) -> None:
        """Remember a request in place of the one `before` that it continues.

        Not if `walks` were forgotten meanwhile: large requests are followed in threads.
        """
        if self._walks is walks:
            self._walks = [*(each for each in walks if each is not before), new][-WALKS:]

    def is_continued(self, node: Node) -> bool:
        """Return whether something was asked after an answer."""
        key = node.ref.seq, node.choice
        return key in self._continued or key in self._continuing

    def is_call_continued(self, ref: CallRef) -> bool:
        """Return whether something was asked after any answer of a call."""
        return any(seq == ref.seq for seq, _ in (*self._continued, *self._continuing))

    def _walk_to(self, root: bytes, messages: Sequence[ChatMessage], stops: tuple[str, ...]) -> _Walk | None:
        """Return the earlier request with the most settled messages of those with which this one begins."""
        fitting = [
            walk
            for walk in self._walks
            if walk.root == root and walk.stops == stops and messages[: len(walk.given)] == walk.given
        ]
        return max(fitting, key=lambda walk: len(walk.given), default=None)

    def forget_walks(self) -> None:
        """Let the next request be followed from its first message."""
        self._walks = []

    def begin_continuing(self, node: Node) -> None:
        """Let an answer count as continued until `end_continuing`, so that an equal one is taken for the next request.

        Once the call is recorded, that is so for good.
        """
        self._continuing[node.ref.seq, node.choice] += 1
        self.continuing_count += 1

    def end_continuing(self, node: Node) -> None:
        """Take back what `begin_continuing` did."""
        key = node.ref.seq, node.choice
        self._continuing[key] -= 1
        if not self._continuing[key]:
            del self._continuing[key]

    def longest_tokens(self, prompt: bytes) -> Node | None:
        """Return the plain completion whose tokens are the longest stored prefix of `prompt` (int32)."""
        longest: Node | None = None
        found = [(node, 0) for node in self._plain.get(None, ())]
        for node, at in found:  # which grows by those that continue one that fits
            own = node.prompt_tail + node.completion
            if prompt.startswith(own, at):
                longest = node if longest is None or node.count > longest.count else longest
                found += [(each, at + len(own)) for each in self._plain.get((node.ref.seq, node.choice), ())]
        return longest

    def add(self, ref: CallRef, record: CallRecord, parent: Node | None, before: bytes) -> None:
        """Add a recorded call, which continues `parent`, with the digest of all messages `before` its answer."""
        if self.knows(ref):
            return
        # A call that was cut off has no answer to continue.
        complete = record.status == CallStatus.COMPLETE
        if parent is not None:
            self._continued.add((parent.ref.seq, parent.choice))
        self._calls_bytes += sum(node.memory_bytes for node in self._unknown(parent)) + len(record.prompt_tail)
        for index, choice in enumerate(record.choices if complete else ()):
            digest = self.sampled.digest_with(before, choice.message) if choice.message is not None else b""
            node = _node(ref, index, record, parent, digest)
            if choice.message is None:
                self._plain.setdefault((parent.ref.seq, parent.choice) if parent else None, []).append(node)
            else:
                self.sampled.add(before, node)
            self._by_call[ref.seq, index] = node
            self._calls_bytes += node.memory_bytes - len(record.prompt_tail)  # which all choices share
        if not complete:
            self._by_call[ref.seq, -1] = Node(ref, -1)
            self._calls_bytes += _OVERHEAD_BYTES
        elif record.request_digest:
            self.answers.setdefault(record.request_digest, []).append(ref)

    def _unknown(self, node: Node | None) -> Iterator[Node]:
        """Yield a node and those that it continues, as far as this conversation never had them."""
        while node is not None and not self.knows(node.ref):
            yield node
            node = node.parent

    def add_stored(self, ref: CallRef, record: CallRecord) -> None:
        """Add a call that was read from the log. Raises `KeyError` unless its parent was added before."""
        self.forget_walks()  # what they did not find may be here
        if record.parent is None:
            parent, before = None, root_digest(record.tools, record.chat_template_kwargs)
        else:
            parent = self._by_call[record.parent.seq, record.parent_choice]
            before = parent.digest
        for message in record.messages:
            before = self.sampled.digest_with(before, message)
        self.add(ref, record, parent, before)


def _node(ref: CallRef, index: int, record: CallRecord, parent: Node | None, digest: bytes) -> Node:
    """Return a choice of a call that continues `parent`, with the digest of the conversation up to it."""
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
    """Return what to remember of a request that was followed from where the request `before` was."""
    settled = followed.settled
    given, taken = messages[: settled.given], settled.taken
    kept = Followed(followed.messages[:taken], followed.digests[:taken], settled=settled)
    if before is None or len(before.given) > len(given):
        return _Walk(root, stops, given, kept, _bytes_of(given))
    return _Walk(root, stops, given, kept, before.memory_bytes + _bytes_of(given[len(before.given) :]))


def _bytes_of(messages: Sequence[ChatMessage]) -> int:
    """Return roughly the memory that messages take."""
    return _OVERHEAD_BYTES * len(messages) + sum(map(len, strings(messages)))
