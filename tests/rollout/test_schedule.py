"""The order of episodes."""

from collections import Counter

import pytest

from bombus.rollout.schedule import Attempt, Schedule
from bombus.rollout.tasks import AgentTask

A, B, C = (AgentTask(task_id=name, prompt=name) for name in "abc")


def drawn(schedule: Schedule, count: int) -> str:
    found = [schedule.next() for _ in range(count)]
    return "".join("-" if attempt is None else attempt.task.task_id for attempt in found)


def test_the_episodes_of_a_task_come_together_so_that_groups_fill_one_after_another() -> None:
    schedule = Schedule([A, B, C], 2, 2, None)
    assert schedule.total == 12
    assert drawn(schedule, 13) == "aabbccaabbcc-"


def test_a_seed_shuffles_each_epoch_anew_and_repeatably() -> None:
    first, again = Schedule([A, B, C], 1, 4, 7), Schedule([A, B, C], 1, 4, 7)
    order = drawn(first, 12)
    assert order == drawn(again, 12)
    epochs = [order[start : start + 3] for start in range(0, 12, 3)]
    assert all(sorted(epoch) == ["a", "b", "c"] for epoch in epochs)
    assert len(set(epochs)) > 1


def test_without_a_number_of_epochs_tasks_go_on_for_ever() -> None:
    schedule = Schedule([A], 1, None, None)
    assert schedule.total is None
    assert drawn(schedule, 100) == "a" * 100


def test_an_episode_that_is_played_again_comes_first_and_failures_are_counted() -> None:
    schedule = Schedule([A, B], 1, 1, None)
    first = schedule.next()
    assert first == Attempt(A)
    schedule.again(first, failed=True)
    assert schedule.next() == Attempt(A, 1)
    schedule.again(Attempt(A, 1), failed=False)
    assert schedule.next() == Attempt(A, 1), "what the hive took back is no failure"
    assert drawn(schedule, 2) == "b-"


def test_a_schedule_that_is_stopped_has_no_next_episode() -> None:
    schedule = Schedule([A, B], 1, None, None)
    schedule.again(Attempt(A), failed=False)
    schedule.stop()
    assert schedule.next() is None


@pytest.mark.parametrize("seed", [None, 7])
def test_a_run_that_goes_on_plays_what_is_left_wherever_it_was(seed: int | None) -> None:
    whole = drawn(Schedule([A, B, C], 2, 3, seed), 18)
    for played in range(19):
        rest = Schedule([A, B, C], 2, 3, seed, Counter(whole[:played]))
        assert rest.total == 18 - played
        assert drawn(rest, 19 - played) == whole[played:] + "-"
    assert drawn(Schedule([A, B], 2, None, None, {"a": 3, "b": 2}), 5) == "abbaa", "one of `a` ended before its turn"
