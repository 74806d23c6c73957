"""Merge the call records of one episode into token sequences, so that every sampled token is trained exactly once.

A node is one choice of one call. Its path is its parent's path, the call's prompt tail and the sampled tokens; a
leaf's path is a sequence. Branches share their common prefix: it is trained in the first sequence that holds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bombus.errors import LogCorrupted
from bombus.hive.records import CallRecord, CallStatus

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One line of an episode, cut after its last trained token. All arrays have the length of `tokens` (T).

    `logprobs_T` (the sampler's), `versions_T`, `calls_T` and `temperatures_T` are set at sampled tokens; elsewhere
    they are 0, -1, -1 and 1. `calls_T` indexes the records that `merge_calls` was given.
    """

    episode: str
    tokens_T: Ints
    loss_mask_T: Flags
    logprobs_T: Floats
    versions_T: Ints
    calls_T: Ints
    temperatures_T: Floats

    def __len__(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True)
class MergedEpisode:
    """An episode's sequences. `merged_calls` of `calls` extended another call; the others began a line of their own."""

    sequences: tuple[TokenSequence, ...]
    calls: int
    merged_calls: int
    trained_tokens: int


@dataclass(frozen=True, eq=False)
class _Node:
    """One choice of one call. `path` has all tokens to its end as int32 bytes, which compare at the speed of memcmp."""

    call: int
    choice: int
    parent: "_Node | None"
    prompt_bytes: int
    path: bytes
    trained: bool


def merge_calls(episode: str, records: Sequence[CallRecord], context: Sequence[CallRecord] = ()) -> MergedEpisode:
    """Merge the calls that belong to `episode`, in the order in which they were recorded.

    `context` has calls that no longer belong to the episode but are parents of some that do (a call that was cut off,
    or came late): their tokens are read, never trained. Calls at temperature 0 are not trained either, nor those whose
    engine held them to a form: they were not drawn from the policy's distribution, and there is no logprob to correct
    with. The probability of a token that a form leaves alone is 1, whatever the policy says.

    Raises `LogCorrupted` when a parent is missing, a length disagrees or a logprob is not finite.
    """
    nodes = _link(records, context)
    parents = {id(node.parent) for node in nodes if node.parent is not None}
    claimed: set[tuple[int, int]] = set()
    sequences: list[TokenSequence] = []
    for leaf in nodes:
        if id(leaf) in parents:
            continue
        sequence = _sequence(episode, _line(leaf), records, context, claimed)
        if sequence is not None:
            sequences.append(sequence)
    merged = {node.call for node in nodes if node.parent is not None and node.call < len(records)}
    trained = sum(int(sequence.loss_mask_T.sum()) for sequence in sequences)
    return MergedEpisode(tuple(sequences), len(records), len(merged), trained)


def _link(records: Sequence[CallRecord], context: Sequence[CallRecord]) -> list[_Node]:
    """Make the nodes, parents before children. Context calls are numbered after the episode's own."""
    numbered = [*enumerate(records), *enumerate(context, start=len(records))]
    waiting = sorted(numbered, key=lambda pair: pair[0] < len(records))  # context first: it holds parents
    nodes: dict[str, list[_Node]] = {}
    ordered: list[_Node] = []
    while waiting:
        later = []
        for index, record in waiting:
            if record.parent is not None and record.parent.id not in nodes:
                later.append((index, record))
                continue
            trained = index < len(records) and record.status == CallStatus.COMPLETE
            drawn = record.sampling.temperature > 0 and not record.constrained
            made = _nodes_of(index, record, nodes, ordered, trained and drawn)
            nodes[record.id] = made
            ordered.extend(made)
        if len(later) == len(waiting):
            orphan = later[0][1]
            missing = orphan.parent.id if orphan.parent else ""
            raise LogCorrupted(f"call {orphan.id}: its parent {missing} is not among the episode's calls")
        waiting = later
    return ordered


def _nodes_of(
    index: int, record: CallRecord, nodes: dict[str, list[_Node]], earlier: list[_Node], trained: bool
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
            f"call {record.id}: its prompt has {len(prompt) // 4} tokens, the record says {record.prompt_tokens}"
        )
    for choice in record.choices:
        if len(choice.tokens) != len(choice.logprobs) or len(choice.tokens) % 4:
            raise LogCorrupted(f"call {record.id}: a choice has not one logprob for each token")
    return [
        _Node(index, number, parent, len(prompt), prompt + choice.tokens, trained)
        for number, choice in enumerate(record.choices)
    ]


def _longest_prefix(prompt: bytes, nodes: list[_Node]) -> _Node | None:
    """Find the node whose whole path begins `prompt`: the longest of several, the first of equals."""
    best: _Node | None = None
    for node in nodes:
        if node.path and (best is None or len(node.path) > len(best.path)) and prompt.startswith(node.path):
            best = node
    return best


def _line(leaf: _Node) -> list[_Node]:
    line: list[_Node] = []
    node: _Node | None = leaf
    while node is not None:
        line.append(node)
        node = node.parent
    return line[::-1]


def _sequence(
    episode: str,
    line: list[_Node],
    records: Sequence[CallRecord],
    context: Sequence[CallRecord],
    claimed: set[tuple[int, int]],
) -> TokenSequence | None:
    """Make the sequence of one line, claiming what no other trains. None when nothing in it is left to train."""
    tokens = np.frombuffer(line[-1].path, dtype="<i4").astype(np.int64)
    length = len(tokens)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int64)
    calls = np.full(length, -1, dtype=np.int64)
    temperatures = np.ones(length, dtype=np.float32)
    for node in line:
        if node.call >= len(records):
            continue
        record = records[node.call]
        choice = record.choices[node.choice]
        start, end = node.prompt_bytes // 4, len(node.path) // 4
        logprobs[start:end] = np.frombuffer(choice.logprobs, dtype="<f4")
        calls[start:end] = node.call
        temperatures[start:end] = max(record.sampling.temperature, 0.0) or 1.0
        for span in choice.spans:
            versions[start + span.start : start + span.end] = span.version
        if node.trained and (node.call, node.choice) not in claimed:
            claimed.add((node.call, node.choice))
            mask[start:end] = True
    mask[:1] = False  # nothing comes before the first token, so nothing can predict it
    if not np.isfinite(logprobs[mask]).all():
        raise LogCorrupted(f"episode {episode}: a sampled token's logprob is not finite")
    trained = np.flatnonzero(mask)
    if not len(trained):
        return None
    end = int(trained[-1]) + 1
    return TokenSequence(
        episode, tokens[:end], mask[:end], logprobs[:end], versions[:end], calls[:end], temperatures[:end]
    )
