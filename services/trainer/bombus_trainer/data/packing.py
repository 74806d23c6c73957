"""Packs sequences into flat rows without padding, in which tokens that sequences share appear only once.

If prefixes are shared, the sequences of a bin form a compressed token trie: the prompt that the members of a group
share is one segment, and the completions are its children. This only changes the layout of the computation. The loss is
computed over a list of terms, each pointing at the row whose hidden state predicts it, so it is exactly the loss of the
separate sequences.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from bombus_trainer.data.bins import greedy
from bombus_trainer.data.sequences import Floats, Ints
from bombus_trainer.settings import TrainerSettings


@dataclass(frozen=True, eq=False)
class Terms:
    """N trained tokens, as parallel arrays [N]. `ids_N` are their numbers among the terms of the whole batch."""

    ids_N: Ints
    targets_N: Ints
    temperatures_N: Floats
    sampler_logprobs_N: Floats
    advantages_N: Floats
    weights_N: Floats

    def __len__(self) -> int:
        return len(self.targets_N)

    def take(self, order: Ints) -> "Terms":
        return Terms(*(getattr(self, field.name)[order] for field in fields(self)))

    @staticmethod
    def concatenate(parts: Sequence["Terms"]) -> "Terms":
        names = [field.name for field in fields(Terms)]
        return Terms(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True, eq=False)
class TrainingItem:
    """One sequence: its tokens [T], the ascending positions of its N trained tokens (all >= 1), and their terms."""

    tokens_T: Ints
    positions_N: Ints
    terms: Terms


@dataclass(frozen=True)
class Segment:
    """Tokens [start, start + length) of a row, at positions [depth, depth + length), after segment `parent` (-1 if
    none)."""

    start: int
    length: int
    depth: int
    parent: int


@dataclass(frozen=True, eq=False)
class Bin:
    """One micro-batch: a flat row of T tokens and the terms that its hidden states predict.

    `heads` are the distinct (row, temperature) pairs that need logits, since several terms may have different targets
    but the same hidden state. `head_of_term_N` never decreases. `sequences_N` is the number (below `sequences`) of the
    sequence that each term belongs to. A sequence is never split, so all its terms are in one bin.
    """

    tokens_T: Ints
    positions_T: Ints
    segments: tuple[Segment, ...]
    head_rows_U: Ints
    head_temperatures_U: Floats
    head_of_term_N: Ints
    terms: Terms
    sequences_N: Ints
    sequences: int
    sequence_tokens: int  # total of all sequences, without sharing


class _Node:
    """A run of tokens in a trie under construction. If it is split, this object keeps the lower part."""

    __slots__ = ("depth", "parent", "start", "tokens")

    def __init__(self, parent: "_Node | None", depth: int, tokens: Ints) -> None:
        self.parent = parent
        self.depth = depth
        self.tokens = tokens
        self.start = 0

    @property
    def end(self) -> int:
        return self.depth + len(self.tokens)

    def path(self) -> list["_Node"]:
        nodes: list[_Node] = []
        node: _Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class _Trie:
    """A trie to which sequences are added in lexicographic order, so each shares its longest prefix with the previous
    one."""

    def __init__(self, shared_tokens_min: int | None) -> None:
        self.shared_tokens_min = shared_tokens_min  # None: share nothing
        self.nodes: list[_Node] = []
        self.tokens = 0
        self._last: _Node | None = None
        self._last_tokens: Ints = np.zeros(0, dtype=np.int64)

    def shared(self, tokens: Ints) -> int:
        """Return how many of these tokens are present and worth sharing. Splitting a node to share only a few tokens is
        not worthwhile."""
        if self._last is None or self.shared_tokens_min is None:
            return 0
        common = common_prefix(self._last_tokens, tokens)
        edge = max((node.end for node in self._last.path() if node.end <= common), default=0)
        return common if common - edge >= self.shared_tokens_min else edge

    def add(self, tokens: Ints) -> _Node:
        """Add a sequence and return its last node."""
        depth = self.shared(tokens)
        node = self._node_ending_at(depth)
        if node is None or depth < len(tokens):
            node = _Node(node, depth, tokens[depth:])
            self.nodes.append(node)
            self.tokens += len(tokens) - depth
        self._last, self._last_tokens = node, tokens
        return node

    def _node_ending_at(self, depth: int) -> _Node | None:
        if depth == 0 or self._last is None:
            return None
        node = next(node for node in self._last.path() if node.end >= depth)
        if node.end == depth:
            return node
        cut = depth - node.depth
        upper = _Node(node.parent, node.depth, node.tokens[:cut])
        node.parent, node.depth, node.tokens = upper, depth, node.tokens[cut:]
        self.nodes.insert(self.nodes.index(node), upper)  # parents stay before their children
        return upper


def common_prefix(left: Ints, right: Ints) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def shard_bins(items: Sequence[TrainingItem], settings: TrainerSettings, ranks: int) -> list[list[Bin]]:
    """Return the micro-batches of each rank. Ranks differ by at most one micro-batch, and the first rank has the most.

    Bins are smaller than `settings.bin_tokens` if some rank would otherwise have none. Without `enable_packing`, each
    sequence gets its own bin.
    """
    if settings.config.enable_packing:
        even = -(-sum(len(item.tokens_T) - 1 for item in items) // ranks)
        bins = pack(items, min(settings.bin_tokens, max(1, even)), settings.config.share_prefixes)
    else:
        bins = pack(items, 1, share_prefixes=False)
    return [bins[rank::ranks] for rank in range(ranks)]


def pack(
    items: Iterable[TrainingItem], bin_tokens: int, share_prefixes: bool = True, shared_tokens_min: int = 16
) -> list[Bin]:
    """Fill bins of at most `bin_tokens` computed tokens; a longer sequence gets its own bin. The result is
    deterministic.

    With `share_prefixes`, sequences are added in lexicographic order, otherwise in the given order. Each goes into the
    same bin as the previous one if there is room. Nothing is padded, so a bin that is not full costs nothing extra.
    """
    if share_prefixes:
        return list(_shared_bins(items, bin_tokens, shared_tokens_min))
    alone = list(items)
    filled = greedy([len(item.tokens_T) - 1 for item in alone], bin_tokens)
    return [_bin_of([alone[index] for index in each]) for each in filled]


def _shared_bins(items: Iterable[TrainingItem], bin_tokens: int, shared_tokens_min: int) -> Iterator[Bin]:
    # A sequence's last token is only a target, so it needs no row.
    ordered = sorted(items, key=lambda item: item.tokens_T[:-1].astype(">u4").tobytes())
    trie = _Trie(shared_tokens_min)
    content: list[tuple[TrainingItem, _Node]] = []
    for item in ordered:
        inputs = item.tokens_T[:-1]
        if content and trie.tokens + len(inputs) - trie.shared(inputs) > bin_tokens:
            yield _lay_out(trie, content)
            trie, content = _Trie(shared_tokens_min), []
        content.append((item, trie.add(inputs)))
    if content:
        yield _lay_out(trie, content)


def _bin_of(items: Iterable[TrainingItem]) -> Bin:
    """Lay out sequences end to end, with nothing shared."""
    trie = _Trie(None)
    return _lay_out(trie, [(item, trie.add(item.tokens_T[:-1])) for item in items])


def _lay_out(trie: _Trie, content: list[tuple[TrainingItem, _Node]]) -> Bin:
    number: dict[int, int] = {}
    segments: list[Segment] = []
    start = 0
    for node in trie.nodes:
        node.start = start
        parent = -1 if node.parent is None else number[id(node.parent)]
        number[id(node)] = len(segments)
        segments.append(Segment(start, len(node.tokens), node.depth, parent))
        start += len(node.tokens)
    rows = []
    for item, leaf in content:
        rows_T = np.concatenate([np.arange(node.start, node.start + len(node.tokens)) for node in leaf.path()])
        rows.append(rows_T[item.positions_N - 1])
    head_rows_N = np.concatenate(rows)
    terms = Terms.concatenate([item.terms for item, _ in content])
    sequences_N = np.repeat(np.arange(len(content)), [len(item.terms) for item, _ in content])
    order = np.lexsort((terms.ids_N, terms.temperatures_N, head_rows_N))
    head_rows_N, terms = head_rows_N[order], terms.take(order)
    fresh_N = np.ones(len(terms), dtype=np.bool_)
    fresh_N[1:] = (np.diff(head_rows_N) != 0) | (np.diff(terms.temperatures_N) != 0)
    return Bin(
        tokens_T=np.concatenate([node.tokens for node in trie.nodes]),
        positions_T=np.concatenate([np.arange(node.depth, node.end) for node in trie.nodes]),
        segments=tuple(segments),
        head_rows_U=head_rows_N[fresh_N],
        head_temperatures_U=terms.temperatures_N[fresh_N],
        head_of_term_N=np.cumsum(fresh_N) - 1,
        terms=terms,
        sequences_N=sequences_N[order],
        sequences=len(content),
        sequence_tokens=sum(len(item.tokens_T) - 1 for item, _ in content),
    )
