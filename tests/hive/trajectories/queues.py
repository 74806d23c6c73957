"""Queues for tests: built in a line, and driven at random from one seed."""

from random import Random

from bombus.hive.records import BodyRef
from bombus.hive.trajectories.forming import form
from bombus.hive.trajectories.queue import (
    Environment,
    QueuedGroup,
    TrajectoryQueue,
    give_up,
    join,
    leave,
    push,
    put_back,
    register,
    take,
    why_not_queued,
)

SEQUENCE_TOKENS = 10


def queue_of(batch_size: int, *environments: Environment) -> TrajectoryQueue:
    queue = TrajectoryQueue()
    register(queue, batch_size)
    for environment in environments:
        join(queue, environment, environment.name)
    return queue


def environment(
    id: int, group_size: int, weight: float = 1.0, minimum: float | None = None, max_tokens: int = 100
) -> Environment:
    return Environment(
        id=id, name=f"math_{id}", max_tokens=max_tokens, weight=weight, group_size=group_size, minimum=minimum
    )


def groups(environment: int | None, *sizes: int) -> list[QueuedGroup]:
    holder = "" if environment is None else f"key-{environment % 2}"
    return [
        QueuedGroup(environment, size, size * SEQUENCE_TOKENS, body=BodyRef((1,), 7 * size, b""), holder=holder)
        for size in sizes
    ]


def next_batch(queue: TrajectoryQueue) -> tuple[int, ...] | None:
    """Form a batch and take it."""
    batch = form(queue)
    if batch is not None:
        take(queue, batch)
    return batch


def entries(queue: TrajectoryQueue) -> dict[int, tuple[int | None, int]]:
    """Return the environment and the size of everything that a batch can take, by its number in a line."""
    held = {
        number
        for each in queue.environments.values()
        for line in each.held.values()
        for number in line.numbers
        if number in queue.groups
    }
    inner = {number for members in queue.combined.values() for number in members}
    return {
        number: (group.environment, sum(queue.groups[each].sequences for each in queue.members(number)))
        for number, group in queue.groups.items()
        if number not in held and (number in queue.combined or number not in inner)
    }


class Player:
    """Does random things to a queue that clients could do: few environments and sizes, so that they meet."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.queue = TrajectoryQueue()
        self.pushed = 0
        self.taken: list[int] = []
        if self.random.random() < 0.9:
            register(self.queue, self.random.randint(1, 16))

    def step(self) -> None:
        act = self.random.choices([self.join, self.leave, self.push, self.take], [1, 0.4, 5, 2])[0]
        act()

    def join(self) -> None:
        random, queue = self.random, self.queue
        weight = random.choice([0.0, 0.5, 1.0, 3.0])
        minimum = random.choice([None, None, 0.0, 0.25, 0.5, 0.8])
        id = queue.joined if random.random() < 0.8 or not queue.joined else random.randrange(queue.joined)
        join(queue, environment(id, random.choice([1, 2, 3, 4, 6, 8]), weight, minimum), "math")

    def leave(self) -> None:
        leave(self.queue, self.random.randrange(4))

    def push(self) -> None:
        random, queue = self.random, self.queue
        for _ in range(random.randint(1, 4)):
            sender = random.choice([None, *range(queue.joined), 99])
            known = queue.environments.get(-1 if sender is None else sender)
            own = known.group_size if known is not None and random.random() < 0.7 else random.randint(1, 6)
            sent = groups(sender, *[own] * random.randint(1, 3))
            if not why_not_queued(queue, sent):
                push(queue, sent)
                self.pushed += len(sent)

    def take(self) -> None:
        self.taken += next_batch(self.queue) or ()

    def lose(self) -> list[int]:
        """Lose some groups, queued or of a batch that was just taken, and return their numbers."""
        random, queue = self.random, self.queue
        batch = form(queue)
        if batch is None or random.random() < 0.5:
            lost = random.sample(sorted(queue.groups), min(len(queue.groups), random.randint(0, 3)))
            give_up(queue, lost)
            return lost
        combined = {each: queue.combined[each] for each in batch if each in queue.combined}
        taken = dict(zip(batch, take(queue, batch), strict=True))
        lost = random.sample(batch, random.randint(0, min(2, len(batch))))
        put_back(queue, taken, combined, lost)
        return lost
