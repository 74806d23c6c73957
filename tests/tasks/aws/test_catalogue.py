"""The tasks themselves."""

from collections import Counter

from bombus.tasks.aws.catalogue import TASKS, TIERS


def test_there_are_at_least_twenty_tasks_in_five_tiers() -> None:
    assert len(TASKS) >= 20
    assert set(Counter(task.tier for task in TASKS)) == set(TIERS)
    assert len({task.name for task in TASKS}) == len(TASKS)
    assert all(task.checks and task.gold for task in TASKS)
