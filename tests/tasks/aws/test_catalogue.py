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


def test_fewer_tasks_than_were_asked_for_and_those_of_training_in_an_evaluation_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = AwsTasks("warmup")
    with caplog.at_level(logging.WARNING, "bombus"):
        assert len(tasks.draw(TaskDraw(size=5))) == 5
        assert caplog.messages == []
        assert len(tasks.draw(TaskDraw(size=8))) == 5
        tasks.draw(TaskDraw(size=1, split=TaskSplit.EVAL))
    assert caplog.messages == [
        "aws:warmup has 5 tasks: 8 were asked for, 5 are drawn",
        "aws:warmup has the same tasks for evaluation as for training",
    ]
