import asyncio

import pytest

from bombus.bus.window import Window
from bombus.errors import BusUnavailable


async def test_a_full_window_admits_the_next_message_when_room_is_given_back() -> None:
    window = Window(messages_max=10, bytes_max=100)
    assert window.try_acquire(60)
    assert not window.try_acquire(60)
    waiting = asyncio.create_task(window.acquire(60, timeout_s=5))
    await asyncio.sleep(0)
    window.release(60)
    await waiting
    assert (window.messages, window.bytes) == (1, 60)


async def test_the_longest_waiting_goes_first_even_when_a_smaller_one_would_fit() -> None:
    window = Window(messages_max=10, bytes_max=100)
    assert window.try_acquire(60)
    order: list[str] = []

    async def take(name: str, size: int) -> None:
        await window.acquire(size, timeout_s=5)
        order.append(name)

    tasks = [asyncio.create_task(take("large", 80)), asyncio.create_task(take("small", 10))]
    await asyncio.sleep(0)
    assert not window.try_acquire(10)
    window.release(60)
    await asyncio.gather(*tasks)
    assert order == ["large", "small"]


async def test_waiting_for_room_times_out_and_leaves_the_window_unchanged() -> None:
    window = Window(messages_max=1, bytes_max=100)
    assert window.try_acquire(10)
    with pytest.raises(BusUnavailable, match="no room"):
        await window.acquire(10, timeout_s=0.01)
    assert (window.messages, window.bytes) == (1, 10)
    window.release(10)
    assert window.try_acquire(10)


async def test_a_sender_that_gives_up_does_not_block_those_after_it() -> None:
    window = Window(messages_max=10, bytes_max=100)
    assert window.try_acquire(60)
    large = asyncio.create_task(window.acquire(90, timeout_s=5))
    small = asyncio.create_task(window.acquire(10, timeout_s=5))
    await asyncio.sleep(0)
    large.cancel()
    await small
    assert (window.messages, window.bytes) == (2, 70)


async def test_a_message_larger_than_the_window_passes_alone() -> None:
    window = Window(messages_max=10, bytes_max=100)
    assert window.try_acquire(1_000)
    assert not window.try_acquire(1)


async def test_the_queue_for_a_window_is_bounded_too() -> None:
    window = Window(messages_max=1, bytes_max=100)
    assert window.try_acquire(1)
    waiting = asyncio.create_task(window.acquire(1, timeout_s=5))
    await asyncio.sleep(0)
    with pytest.raises(BusUnavailable, match=r"messages are in flight and \d+ are waiting"):
        await window.acquire(1, timeout_s=5)
    waiting.cancel()
