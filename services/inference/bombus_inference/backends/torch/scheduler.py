"""Chooses which sequences compute which tokens in the next forward pass, and in which blocks. It does only the
accounting.

Decoding sequences go first, in order of admission; then prompts, up to the prefill budget. A decoding sequence that
finds no free block takes the blocks of the most recently admitted sequence. That sequence is preempted: it recomputes
its tokens later and continues with its own random numbers.
"""

from collections import deque
from collections.abc import Iterable

from bombus_inference.backends.torch.cache import Blocks
from bombus_inference.backends.torch.pool import SequenceChunk
from bombus_inference.backends.torch.sequences import SequenceState

ScheduledChunks = list[tuple[SequenceState, SequenceChunk]]


class Scheduler:
    def __init__(self, blocks: Blocks, *, max_running: int, prefill_tokens_max: int) -> None:
        self.blocks = blocks
        self.max_running = max_running
        self.prefill_tokens_max = prefill_tokens_max
        self.running: list[SequenceState] = []  # sequences that hold blocks, in order of admission
        self.waiting: deque[SequenceState] = deque()
        self.preemptions = 0
        self.cached_tokens = 0

    def next_work(self) -> ScheduledChunks:
        """Plan the next forward pass: take the blocks it needs, and remember those it fills. The plan is empty only if
        there is nothing to do."""
        work: ScheduledChunks = []
        scheduled: set[SequenceState] = set()
        for sequence in list(self.running):
            if sequence.missing == 1 and sequence.blocks and self._make_room(sequence, scheduled):
                work.append((sequence, self._advance(sequence, 1)))
                scheduled.add(sequence)
        budget = self.prefill_tokens_max
        for sequence in self.running:
            if budget and sequence not in scheduled:
                budget -= self._prefill(sequence, budget, work)
        while budget and self.waiting and self._admit(self.waiting[0]):
            budget -= self._prefill(self.waiting.popleft(), budget, work)
        if not work and self.running:
            # All running sequences are half-computed prompts and no block is left: preempt the one admitted last.
            self._preempt(self.running[-1])
            return self.next_work()
        return work

    def drop(self, sequences: Iterable[SequenceState]) -> None:
        """Remove these sequences, running or waiting, and give back their blocks."""
        gone = set(sequences)
        for sequence in gone:
            self._release(sequence)
        self.running = [sequence for sequence in self.running if sequence not in gone]
        if any(sequence in gone for sequence in self.waiting):
            self.waiting = deque(sequence for sequence in self.waiting if sequence not in gone)

    def weights_changed(self) -> None:
        """Forget all keys and values. Running sequences recompute their tokens before waiting sequences are admitted.

        Each sequence's next token is thus sampled from the new policy alone, as the token's version number implies.
        """
        self.blocks.forget_all()
        for sequence in reversed(self.running):
            self._release(sequence)
            self.waiting.appendleft(sequence)
        self.running = []

    def _admit(self, sequence: SequenceState) -> bool:
        if len(self.running) >= self.max_running:
            return False
        sequence.parent = self.blocks.root(sequence.request.adapter)
        self._extend_from_cache(sequence)
        room = len(sequence.tokens) // self.blocks.block_tokens + 1 - len(sequence.blocks)
        # Leave one spare block for each running sequence, so that the new one is not preempted immediately.
        if self.running and self.blocks.available < room + len(self.running):
            self._release(sequence)
            return False
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_tokens)
            self.cached_tokens += sequence.cached
        self.running.append(sequence)
        return True

    def _extend_from_cache(self, sequence: SequenceState) -> None:
        """Reuse cached blocks for the sequence's next tokens. The last token is always computed, to get its logits.

        A prompt that is being scored reuses nothing, since the cache has no logits.
        """
        if sequence.is_scoring:
            return
        size = self.blocks.block_tokens
        while sequence.parent is not None and sequence.computed == sequence.remembered * size:
            end = sequence.computed + size
            if end >= len(sequence.tokens):
                return
            block = self.blocks.find(sequence.parent, tuple(sequence.tokens[sequence.computed : end]))
            if block is None:
                return
            sequence.blocks.append(block)
            sequence.parent = self.blocks.name_of(block)
            sequence.remembered += 1
            sequence.computed = end

    def _prefill(self, sequence: SequenceState, budget: int, work: ScheduledChunks) -> int:
        """Schedule as much of a sequence's prompt as budget and blocks allow, and return the number of tokens.

        If another sequence has computed blocks of this prompt in the meantime, reuse those first.
        """
        if len(sequence.blocks) * self.blocks.block_tokens == sequence.computed:
            self._extend_from_cache(sequence)
        room = (len(sequence.blocks) + self.blocks.available) * self.blocks.block_tokens - sequence.computed
        count = min(sequence.missing, budget, room)
        if count <= 0:
            return 0
        while len(sequence.blocks) * self.blocks.block_tokens < sequence.computed + count:
            sequence.blocks.append(self.blocks.take())
        work.append((sequence, self._advance(sequence, count)))
        return count

    def _advance(self, sequence: SequenceState, count: int) -> SequenceChunk:
        """Count these tokens as computed, and remember the blocks that they fill.

        Another sequence may use such a block in the same pass, because each layer writes before it attends.
        """
        start, end = sequence.computed, sequence.computed + count
        sequence.computed = end
        size = self.blocks.block_tokens
        while sequence.parent is not None and (sequence.remembered + 1) * size <= end:
            first = sequence.remembered * size
            tokens = tuple(sequence.tokens[first : first + size])
            block = sequence.blocks[sequence.remembered]
            sequence.parent = self.blocks.remember(block, sequence.parent, tokens)
            sequence.remembered += 1
        return SequenceChunk(sequence.tokens[start:end], start, sequence.blocks, sequence.block_owner)

    def _make_room(self, sequence: SequenceState, scheduled: set[SequenceState]) -> bool:
        """Get a block for the sequence's next token, by preemption if needed. Return false if the sequence itself was
        preempted."""
        if len(sequence.blocks) * self.blocks.block_tokens > sequence.computed:
            return True
        while not self.blocks.available:
            victim = next(one for one in reversed(self.running) if one not in scheduled)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks.append(self.blocks.take())
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: SequenceState) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.remembered = 0
        sequence.parent = None
        sequence.block_owner = object()
        sequence.score_again()
