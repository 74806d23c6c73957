"""Chooses the next task: the open task with the highest priority. Pure."""

from collections.abc import Collection, Iterator
from hashlib import blake2b

from bombus.curriculum.progress import CurriculumProgress


def priority(task: str, progress: CurriculumProgress) -> float:
    """Return the priority of a task: new tasks, weak ones and those due for review come first."""
    rules, known = progress.plan.mastery, progress.of(task)
    value = rules.weakness * (1 - progress.rate(task)) if known.results else rules.novelty
    if known.has_graduated and progress.results >= known.due:
        value += rules.review
    if known.results and progress.results - known.newest < rules.recent:
        value += rules.recency
    return value


def open_tasks(progress: CurriculumProgress) -> Iterator[str]:
    """Yield the tasks that may be chosen next: those of the current tier, and those of earlier tiers that are due or
    have returned.

    A task of an earlier tier that never graduated is not chosen again.
    """
    yield from progress.tier.tasks
    for tier in progress.plan.tiers[: progress.tier_index]:
        for task in tier.tasks:
            known = progress.of(task)
            if known.has_returned or (known.has_graduated and progress.results >= known.due):
                yield task


def choose(progress: CurriculumProgress, seed: int, draw: int, taken: Collection[str] = ()) -> str | None:
    """Return the open task with the highest priority that is not taken, or None if all are taken.

    Equal priorities are ordered by a digest of the seed, the draw's number, and the task's id.
    """
    free = [task for task in open_tasks(progress) if task not in taken]
    return max(free, key=lambda task: (priority(task, progress), _lot(seed, draw, task)), default=None)


def _lot(seed: int, draw: int, task: str) -> bytes:
    return blake2b(f"{seed}/{draw}/{task}".encode(), digest_size=8).digest()
