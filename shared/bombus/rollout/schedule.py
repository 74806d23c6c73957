"""Chooses the next episode to play: epochs of tasks, groups of episodes of one task, and repeated episodes."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from bombus.rollout.tasks import AgentTask


class Attempt(msgspec.Struct, frozen=True):
    """An episode to play. `failed` counts earlier attempts at it that failed because of the infrastructure."""

    task: AgentTask
    failed: int = 0


class Schedule:
    """Hands out each task `repeat` times, one task after another, for `epochs` epochs, or endlessly if `epochs` is
    None.

    With a seed, each epoch is shuffled differently; without one, the tasks keep the order of the file. `done` counts
    the episodes of each task that earlier runs of the same schedule have played, and that many episodes of the task are
    skipped.
    """

    def __init__(
        self,
        tasks: Sequence[AgentTask],
        repeat: int,
        epochs: int | None,
        seed: int | None,
        done: Mapping[str, int] | None = None,
    ) -> None:
        self._done = Counter(done or {})
        self.total = None if epochs is None else sum(max(0, epochs * repeat - self._done[one.task_id]) for one in tasks)
        self._again: deque[Attempt] = deque()
        self._stopped = False
        self._fresh = (attempt for attempt in _attempts(tasks, repeat, epochs, seed) if not self._was_played(attempt))

    def next(self) -> Attempt | None:
        """Return the next episode to play, or None if all have been handed out or `stop` was called."""
        if self._stopped:
            return None
        return self._again.popleft() if self._again else next(self._fresh, None)

    def _was_played(self, attempt: Attempt) -> bool:
        self._done[attempt.task.task_id] -= 1
        return self._done[attempt.task.task_id] >= 0

    def stop(self) -> None:
        self._stopped = True

    def again(self, attempt: Attempt, *, failed: bool) -> None:
        """Queue an episode again, ahead of all new ones, so that its group is soon complete."""
        self._again.append(Attempt(attempt.task, attempt.failed + failed))


def _attempts(tasks: Sequence[AgentTask], repeat: int, epochs: int | None, seed: int | None) -> Iterator[Attempt]:
    for epoch in itertools.count() if epochs is None else range(epochs):
        order = list(tasks)
        if seed is not None:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        for task in order:
            yield from itertools.repeat(Attempt(task), repeat)
