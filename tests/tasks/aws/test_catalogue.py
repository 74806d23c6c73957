"""The tasks themselves."""

import logging
from collections import Counter

import pytest

from bombus.tasks.aws.catalogue import TASKS, TIERS
from bombus.tasks.aws.family import AwsTasks
from bombus.tasks.kinds import TaskDraw, TaskSplit


def test_there_are_at_least_twenty_tasks_in_five_tiers() -> None:
    assert len(TASKS) >= 20
    assert set(Counter(task.tier for task in TASKS)) == set(TIERS)
    assert len({task.name for task in TASKS}) == len(TASKS)
    assert all(task.checks and task.gold for task in TASKS)


def test_a_tier_draws_no_task_twice_and_says_that_it_evaluates_with_those_of_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = AwsTasks("warmup")
    with caplog.at_level(logging.WARNING, "bombus"):
        assert len({task.task_id for task in tasks.draw(TaskDraw(size=8))}) == 5
        assert caplog.messages == []
        tasks.draw(TaskDraw(size=1, split=TaskSplit.EVAL))
    assert caplog.messages == ["aws:warmup has the same tasks for evaluation as for training"]
