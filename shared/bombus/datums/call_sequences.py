"""Merge the calls of one episode into token sequences in which no sampled token is trained on more than once.

A node is one choice of one call. Its path is its parent's path, followed by the call's prompt tail and the sampled
tokens; a leaf's path is a sequence. Branches share a common prefix, which is trained on only in the first sequence that
has it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bombus.errors import LogCorrupted
from bombus.hive.records import CallRecord, CallStatus, Choice


@dataclass(frozen=True)
class SampledSpan:
    """The tokens [start, end) in a sequence, which call number `call` sampled as one of its choices.

    `learnt` says whether these tokens are trained on in this sequence.
    """

    call: int
    choice: int
    start: int
    end: int
    learnt: bool


@dataclass(frozen=True)
class CallSequence:
    """One sequence of an episode: its tokens (int32), and the spans that the episode's own calls sampled."""

    tokens: bytes
    spans: tuple[SampledSpan, ...]


@dataclass(frozen=True)
class CallSequences:
    """The sequences of an episode. `merged_calls` counts the calls that extend another call instead of beginning a
    sequence."""

    sequences: tuple[CallSequence, ...]
    merged_calls: int


@dataclass(frozen=True, eq=False)
class _Node:
    """One choice of one call. `path` holds all tokens up to the end of the choice, as int32 bytes for fast
    comparison."""

    call: int
    choice: int
    parent: "_Node | None"
    prompt_bytes: int
    path: bytes
    learnt: bool


def call_sequences(records: Sequence[CallRecord], context: Sequence[CallRecord] = ()) -> CallSequences:
    """Merge the calls that belong to an episode, in the order in which they were recorded.

    `context` has calls that do not belong to the episode but are parents of calls that do (they were cut off, or came
    late). Their tokens are read but not trained on. Calls at temperature 0 and calls that the engine constrained to a
    format are not trained on either: they were not drawn from the policy's distribution, and no logprob could correct
    for that. If a format allows only one token, the token's probability is 1, whatever the policy says.

    Raises `LogCorrupted` if a parent is missing or a length is inconsistent.
    """
    nodes = _link(records, context)
    parents = {id(node.parent) for node in nodes if node.parent is not None}
    claimed: set[tuple[int, int]] = set()
    leaves = (node for node in nodes if id(node) not in parents)
    sequences = tuple(CallSequence(leaf.path, tuple(_spans(_way_to(leaf), len(records), claimed))) for leaf in leaves)
    merged = {node.call for node in nodes if node.parent is not None and node.call < len(records)}
    return CallSequences(sequences, len(merged))


def is_learnt(record: CallRecord) -> bool:
    """Return whether the sampled tokens of an episode's own call are trained on; see `call_sequences`."""
    drawn = record.sampling.temperature > 0 and not record.constrained
    return record.status == CallStatus.COMPLETE and drawn


def learnt_tokens(record: CallRecord) -> int:
    """Return how many tokens of an episode's own call are trained on, in all of its sequences together.

    If the prompt is empty, the first token is not trained on, because no token before it could predict it.
    """
    if not is_learnt(record):
        return 0
    first = 0 if record.prompt_tokens else 1
    return sum(max(len(choice.tokens) // 4 - first, 0) for choice in record.choices)


def choice_of(records: Sequence[CallRecord], span: SampledSpan) -> Choice:
    return records[span.call].choices[span.choice]


def _spans(way: Sequence[_Node], own: int, claimed: set[tuple[int, int]]) -> Iterator[SampledSpan]:
    """Yield the spans that the first `own` calls sampled on the way to a leaf. Claim those that no other sequence has
    claimed."""
    for node in way:
        if node.call >= own:
            continue
        is_new = node.learnt and (node.call, node.choice) not in claimed
        if is_new:
            claimed.add((node.call, node.choice))
        yield SampledSpan(node.call, node.choice, node.prompt_bytes // 4, len(node.path) // 4, is_new)


def _link(records: Sequence[CallRecord], context: Sequence[CallRecord]) -> list[_Node]:
    """Return the nodes, parents before children. Context calls are numbered after the episode's own."""
    numbered = [*enumerate(records), *enumerate(context, start=len(records))]
    waiting = sorted(numbered, key=lambda pair: pair[0] < len(records))  # context first, because it contains parents
    nodes: dict[str, list[_Node]] = {}
    ordered: list[_Node] = []
    while waiting:
        later = []
        for index, record in waiting:
            if record.parent is not None and record.parent.id not in nodes:
                later.append((index, record))
                continue
            made = _nodes_of(index, record, nodes, ordered, index < len(records) and is_learnt(record))
            nodes[record.id] = made
            ordered.extend(made)
        if len(later) == len(waiting):
            orphan = later[0][1]
            missing = orphan.parent.id if orphan.parent else ""
            raise LogCorrupted(f"call {orphan.id}: its parent {missing} is not among the episode's calls")
        waiting = later
    return ordered


def _nodes_of(
    index: int, record: CallRecord, nodes: dict[str, list[_Node]], earlier: list[_Node], learnt: bool
) -> list[_Node]:
    if record.parent is not None:
        siblings = nodes[record.parent.id]
        if not 0 <= record.parent_choice < len(siblings):
            raise LogCorrupted(f"call {record.id}: its parent has no choice {record.parent_choice}")
        parent: _Node | None = siblings[record.parent_choice]
        prompt = siblings[record.parent_choice].path + record.prompt_tail
    else:
        prompt = record.prompt_tail
        parent = _longest_prefix(prompt, earlier)
    if len(prompt) != 4 * record.prompt_tokens:
        raise LogCorrupted(
            f"call {record.id}: its prompt has {len(prompt) // 4} tokens, but the record says {record.prompt_tokens}"
        )
    for choice in record.choices:
        if len(choice.tokens) != len(choice.logprobs) or len(choice.tokens) % 4:
            raise LogCorrupted(f"call {record.id}: a choice does not have one logprob for each token")
    return [
        _Node(index, number, parent, len(prompt), prompt + choice.tokens, learnt)
        for number, choice in enumerate(record.choices)
    ]


def _longest_prefix(prompt: bytes, nodes: list[_Node]) -> _Node | None:
    """Return the node with the longest path that is a prefix of `prompt` (the first one, if several do), or None."""
    best: _Node | None = None
    for node in nodes:
        if node.path and (best is None or len(node.path) > len(best.path)) and prompt.startswith(node.path):
            best = node
    return best


def _way_to(leaf: _Node) -> list[_Node]:
    way: list[_Node] = []
    node: _Node | None = leaf
    while node is not None:
        way.append(node)
        node = node.parent
    return way[::-1]
