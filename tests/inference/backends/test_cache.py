"""The cache's accounting: nothing leaks, nothing is held twice, and what is found is what was remembered."""

import random
from collections.abc import Callable

import pytest

from bombus.errors import EngineFault
from bombus_inference.backends.torch.cache import Blocks
from bombus_inference.backends.torch.scheduler import ScheduledChunks, Scheduler
from bombus_inference.backends.torch.sequences import SequenceState
from tests.inference.backends.small_engines import request

SIZE = 4


def test_a_block_that_was_released_is_found_again_under_the_same_prefix_only() -> None:
    blocks = Blocks(3, SIZE)
    first = blocks.take()
    name = blocks.remember(first, blocks.root(), (1, 2, 3, 4))
    second = blocks.take()
    blocks.remember(second, name, (5, 6, 7, 8))
    blocks.release([first, second])
    assert blocks.available == 3
    assert blocks.find(blocks.root(), (5, 6, 7, 8)) is None
    assert blocks.find(blocks.root(), (1, 2, 3, 4)) == first
    assert blocks.find(name, (5, 6, 7, 8)) == second


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    blocks = Blocks(2, SIZE)
    chain = [blocks.take(), blocks.take()]
    name = blocks.remember(chain[0], blocks.root(), (1, 1, 1, 1))
    blocks.remember(chain[1], name, (2, 2, 2, 2))
    blocks.release(chain)
    assert blocks.take() == chain[1]
    assert blocks.find(blocks.root(), (1, 1, 1, 1)) == chain[0]


def test_a_block_in_use_is_never_taken() -> None:
    blocks = Blocks(1, SIZE)
    blocks.take()
    with pytest.raises(EngineFault, match="in use"):
        blocks.take()


def test_after_forgetting_nothing_is_found_and_held_blocks_come_back_free() -> None:
    blocks = Blocks(2, SIZE)
    held, idle = blocks.take(), blocks.take()
    old_root = blocks.root()
    blocks.remember(held, old_root, (1, 1, 1, 1))
    blocks.remember(idle, old_root, (2, 2, 2, 2))
    blocks.release([idle])
    blocks.forget_all()
    for root in (old_root, blocks.root()):
        assert blocks.find(root, (1, 1, 1, 1)) is None
        assert blocks.find(root, (2, 2, 2, 2)) is None
    blocks.release([held])
    assert {blocks.take(), blocks.take()} == {held, idle}


@pytest.mark.parametrize("seed", range(30))
def test_random_sequences_leak_no_block(seed: int) -> None:
    """Sequences arrive, are aborted and finish, and weights change, at random in a cache that is always too small."""
    numbers = random.Random(seed)
    blocks = Blocks(numbers.randint(16, 40), SIZE)
    scheduler = Scheduler(
        blocks, max_running=numbers.randint(1, 12), prefill_tokens_max=numbers.choice([1, 5, 16, 1000])
    )
    content: dict[int, list[int]] = {}  # what a pass wrote to each block, to check what is found there
    alive: list[SequenceState] = []
    for turn in range(400):
        if numbers.random() < 0.3 and turn < 300:
            prompt = [numbers.randrange(2) for _ in range(numbers.randint(1, 40))]
            sequence = SequenceState(turn, request(prompt), 0, prompt, len(prompt) + numbers.randint(1, 20))
            scheduler.waiting.append(sequence)
            alive.append(sequence)
        if alive and numbers.random() < 0.05:
            scheduler.drop([alive.pop(numbers.randrange(len(alive)))])
        if numbers.random() < 0.02:
            scheduler.weights_changed()
        work = scheduler.next_work()
        assert work or not alive
        _write_and_check(work, content, blocks)
        _sample(scheduler, work, lambda: numbers.randrange(2))
        alive = [sequence for sequence in alive if sequence.finish is None]
        _check_holders(scheduler, blocks)
    while scheduler.running or scheduler.waiting:
        _sample(scheduler, scheduler.next_work(), lambda: 0)
    assert blocks.held == 0
    assert all(blocks.holders(block) == 0 for block in range(blocks.count))
    assert len({blocks.take() for _ in range(blocks.count)}) == blocks.count


def _sample(scheduler: Scheduler, work: ScheduledChunks, token: Callable[[], int]) -> None:
    """Give a token to each sequence that is due, and drop those that have finished."""
    for sequence, _ in work:
        if sequence.missing == 0:
            sequence.accept(token(), -1.0, (), 0)
    scheduler.drop([sequence for sequence, _ in work if sequence.finish is not None])


def _write_and_check(work: ScheduledChunks, content: dict[int, list[int]], blocks: Blocks) -> None:
    """Act as a forward pass: write every new token, then check that each sequence's blocks hold all of its tokens."""
    for _, chunk in work:
        for at in range(chunk.start, chunk.end):
            cells = content.setdefault(chunk.blocks[at // SIZE], [-1] * SIZE)
            cells[at % SIZE] = chunk.tokens[at - chunk.start]
    for sequence, chunk in work:
        found = [content[chunk.blocks[at // SIZE]][at % SIZE] for at in range(chunk.end)]
        assert found == sequence.tokens[: chunk.end]


def _check_holders(scheduler: Scheduler, blocks: Blocks) -> None:
    counted = [0] * blocks.count
    for sequence in scheduler.running:
        assert len(sequence.blocks) * SIZE >= sequence.computed
        for block in sequence.blocks:
            counted[block] += 1
    assert all(not sequence.blocks for sequence in scheduler.waiting)
    assert counted == [blocks.holders(block) for block in range(blocks.count)]
