"""The pace of works: marks decide whether a work hangs, and how long it may be still follows from its kind."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from bombus_trainer.publish.tensorfile import CHUNK_BYTES, Shape, write_tensors
from bombus_trainer.recovery.progress import (
    GENEROUS,
    NEWEST,
    SETTLED_S,
    SYNCED_BYTES_S,
    Kind,
    Work,
    WorkPace,
    Works,
    advanced,
    in_thread,
    watch_here,
)

FIRST_S = 600.0


def go(works: Works, work: Work, *gaps_s: float) -> list[str]:
    """Let a work run with these times between its marks, in looks of a second. Return what was found to hang."""
    found = []
    with works.of(work):
        for gap_s in gaps_s:
            found += [str(hung) for _ in range(int(gap_s)) if (hung := works.look(1.0)) is not None]
            work.marks += 1
            works.look(0.0)
    return found


def step(number: int = 1) -> Work:
    return Work(Kind.STEP, f"step {number}")


def test_the_first_work_of_a_kind_may_be_still_for_as_long_as_its_operator_says() -> None:
    works = Works(FIRST_S)
    assert go(works, step(), 599, 600, 2) == []
    assert go(Works(FIRST_S), step(), 602) == ["step 1", "step 1"]


def test_a_slow_trainer_that_moves_is_left_alone_for_days() -> None:
    assert go(Works(FIRST_S), step(), *[590] * 500) == []


def test_afterwards_its_own_pace_decides() -> None:
    works = Works(FIRST_S)
    go(works, step(1), 500, 20)
    assert works.limit_s(step(2)) == FIRST_S, "the first work, which compiles kernels, makes no pace"
    go(works, step(2), 60, 20)
    assert works.limit_s(step(3)) == GENEROUS * 60
    assert go(works, step(3), 1199) == []
    assert go(works, step(4), 1199 * GENEROUS - 1) == [], "and a slower one makes a slower pace"


def test_a_fast_work_still_has_minutes() -> None:
    works = Works(FIRST_S)
    for number in range(3):
        go(works, step(number), 1, 1)
    assert works.limit_s(step()) == SETTLED_S
    assert Works(5.0).limit_s(step()) == 5.0


def test_a_slow_time_is_forgotten_after_some_works() -> None:
    pace = WorkPace()
    for longest_s in (1.0, 100.0, *[30.0] * (NEWEST - 1)):
        pace.note(longest_s)
    assert pace.limit_s(FIRST_S) == GENEROUS * 100.0
    pace.note(30.0)
    assert pace.limit_s(FIRST_S) == GENEROUS * 30.0


def test_each_kind_has_a_pace_of_its_own_and_a_load_has_none() -> None:
    works = Works(FIRST_S)
    for number in range(3):
        go(works, step(number), 50)
        go(works, Work(Kind.LOAD, "loading", limit_s=1620.0), 2)
    assert works.limit_s(step()) == GENEROUS * 50
    assert works.limit_s(Work(Kind.CHECKPOINT, "a checkpoint")) == FIRST_S
    assert works.limit_s(Work(Kind.LOAD, "loading", limit_s=1620.0)) == 1620.0


def test_one_of_two_works_at_once_is_found_and_named() -> None:
    works = Works(FIRST_S)
    hung, moving = Work(Kind.WEIGHTS, "writing version 3"), step(4)
    with works.of(hung):
        assert works.doing == "writing version 3"
        hung.marks, hung.stage = 1, "model.norm.weight"
        works.look(1.0)
        assert go(works, moving, *[100] * 5) == []
        assert works.look(101.0) is hung
        assert works.doing == "writing version 3, model.norm.weight"
    assert works.doing == ""
    assert works.look(10_000.0) is None


async def test_a_thread_marks_the_work_that_it_was_started_for() -> None:
    works = Works(FIRST_S)
    watch_here(works)
    begun, end = threading.Event(), threading.Event()

    def work() -> int:
        advanced("micro-batch 1 of 2")
        begun.set()
        end.wait(10)
        return 7

    running = asyncio.create_task(in_thread(Kind.STEP, "step 3", work))
    await asyncio.to_thread(begun.wait, 10)
    assert works.doing == "step 3, micro-batch 1 of 2"
    assert works.look(FIRST_S + 1) is None, "it has just made a mark"
    assert str(works.look(FIRST_S + 1)) == "step 3, micro-batch 1 of 2"
    end.set()
    assert await running == 7
    assert works.doing == ""


async def test_a_work_that_fails_is_over_too() -> None:
    works = Works(FIRST_S)
    watch_here(works)

    def work() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        await in_thread(Kind.STEP, "step 3", work)
    assert works.doing == ""
    advanced("outside of any work")


def test_checkpoints_and_weights_have_longer_until_their_pace_is_known() -> None:
    """A healthy trainer was ended in the fsync of its first large checkpoint."""
    works = Works(FIRST_S, storing_s=1800.0)
    for kind in (Kind.CHECKPOINT, Kind.WEIGHTS):
        assert works.limit_s(Work(kind, "storing")) == 1800.0
    assert works.limit_s(step()) == FIRST_S
    for _ in range(2):
        go(works, Work(Kind.CHECKPOINT, "a checkpoint"), 30)
    assert works.limit_s(Work(Kind.CHECKPOINT, "a checkpoint")) == GENEROUS * 30


def test_a_work_that_has_written_much_may_be_still_for_as_long_as_a_slow_disk_takes_to_sync_it() -> None:
    written = Work(Kind.CHECKPOINT, "a checkpoint", written_bytes=500 * 10**9)
    assert Works(FIRST_S).limit_s(written) == 500 * 10**9 / SYNCED_BYTES_S


async def test_a_large_tensor_makes_a_mark_for_each_chunk_that_is_written(tmp_path: Path) -> None:
    works = Works(FIRST_S)
    watch_here(works)
    large = torch.zeros(4 * CHUNK_BYTES, dtype=torch.uint8)

    def work() -> tuple[int, int]:
        write_tensors(tmp_path / "state", {"a": Shape(large.dtype, (len(large),))}, [("a", large)], durable=False)
        (watched,) = works._works
        return watched.marks, watched.written_bytes

    assert await in_thread(Kind.CHECKPOINT, "a checkpoint", work) == (4, 4 * CHUNK_BYTES)
