"""A client's training loop: play, report, wait for the next weights, and measure from time to time."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from bombus.demo.games import GameTask, Played
from bombus.demo.player import Player

PLAYED_AT_ONCE_MAX = 128


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Results on the held-out tasks, played greedily. `training_s` is the training time so far, without evaluation."""

    version: int
    training_s: float
    reward: float
    exact: float
    kinds: dict[str, float] = {}  # the share of each kind of answer


class Stepped(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of training episodes, played by policy version `version`."""

    version: int
    training_s: float
    wall_s: float
    reward: float
    exact: float
    episodes: int


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to train: for `steps` steps or `train_s` seconds, or until the mean reward of the last ten batches reaches
    `stop_at`."""

    batch_size: int
    num_repeat: int
    seed: int = 0
    steps: int = 1_000_000
    train_s: float = 300.0
    temperature: float = 1.0  # for training episodes
    stop_at: float = 2.0
    measure: bool = True
    measure_every_s: float = 60.0


class Curve(msgspec.Struct, kw_only=True):
    steps: list[Stepped] = []
    measured: list[Measured] = []

    def trained_s(self) -> float:
        """Return the training time so far."""
        stepped = self.steps[-1].training_s if self.steps else 0.0
        return max(stepped, self.measured[-1].training_s if self.measured else 0.0)

    def cut(self, version: int) -> None:
        """Drop steps from `version` on, and the measurements after them: a hive that was stopped has not trained on
        those batches."""
        self.steps = [step for step in self.steps if step.version < version]
        self.measured = [point for point in self.measured if point.version <= version]

    def smoothed(self) -> float:
        """Return the mean reward of the last ten batches, or 0 before there are ten."""
        last = self.steps[-10:]
        return sum(step.reward for step in last) / 10 if len(last) == 10 else 0.0

    def seconds_to(self, reward: float, of: Callable[[Stepped], float]) -> float | None:
        """Return `of` applied to the first step at which the mean reward of the last ten batches reached `reward`, or
        None if there is no such step."""
        for index in range(9, len(self.steps)):
            if sum(step.reward for step in self.steps[index - 9 : index + 1]) / 10 >= reward:
                return of(self.steps[index])
        return None


def is_over(plan: TrainingPlan, curve: Curve, trained_s: float) -> bool:
    """Return whether there is nothing left to train."""
    return len(curve.steps) >= plan.steps or trained_s >= plan.train_s or curve.smoothed() >= plan.stop_at


class Watcher:
    """The interface of a display. This implementation shows nothing."""

    def measuring(self, done: int, total: int) -> None: ...

    def measured(self, point: Measured) -> None: ...

    def stepped(self, step: Stepped) -> None: ...


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def still_to_play(left: Sequence[GameTask], results: Sequence[Played | None]) -> list[GameTask]:
    """Return the tasks still to play, given the `results` of the first tasks in `left`.

    Episodes that were lost to infrastructure are replayed, each with the same task, since a batch needs whole groups.
    """
    return [task for task, result in zip(left, results) if result is None] + [*left[len(results) :]]


class Clock:
    """Counts the seconds between `go` and `pause`, starting from `before`."""

    def __init__(self, before: float = 0.0) -> None:
        self._before = before
        self._since: float | None = None

    def go(self) -> None:
        self._since = self._since if self._since is not None else time.monotonic()

    def pause(self) -> None:
        self._before, self._since = self.seconds, None

    @property
    def seconds(self) -> float:
        return self._before + (time.monotonic() - self._since if self._since is not None else 0.0)


class Training:
    """The training loop of a demo. `began` is when the command started, on the monotonic clock."""

    def __init__(self, player: Player, plan: TrainingPlan, watcher: Watcher, began: float) -> None:
        self.player = player
        self.plan = plan
        self.watcher = watcher
        self.curve = Curve()
        self.trained = Clock()
        self._began = began
        self._rng = random.Random(plan.seed)

    def go_on(self, curve: Curve, version: int) -> None:
        """Resume training in a hive that is at `version`: keep the curve up to there, and skip the tasks already
        drawn."""
        curve.cut(version)
        self.curve, self.trained = curve, Clock(curve.trained_s())
        self._began -= curve.steps[-1].wall_s if curve.steps else 0.0
        for _ in range(version):
            self._draw()

    def is_over(self) -> bool:
        return is_over(self.plan, self.curve, self.trained.seconds)

    async def run(self) -> Curve:
        """Train as planned. If the plan says so, measure before, after and regularly in between."""
        plan = self.plan
        if plan.measure and not self.curve.measured:
            await self.measure()
        next_measure = plan.measure_every_s * (1 + self.trained.seconds // plan.measure_every_s)
        while not self.is_over():
            await self.step()
            if plan.measure and next_measure <= self.trained.seconds < plan.train_s:
                next_measure += plan.measure_every_s
                await self.measure()
        if plan.measure:
            await self.measure()
        return self.curve

    async def step(self) -> None:
        """Play one batch: `batch_size` tasks with `num_repeat` episodes each.

        The hive trains as soon as the batch is complete. The next claim waits for the new weights, and that wait counts
        as training time.
        """
        self.trained.go()
        played: list[Played] = []
        left = [task for task in self._draw() for _ in range(self.plan.num_repeat)]
        version = -1
        while left:
            claimed = await self.player.claim(min(len(left), PLAYED_AT_ONCE_MAX))
            if version < 0:
                version = await self.player.client.get_global_step()
            results = await self.player.play(claimed, left[: len(claimed)], self.plan.temperature)
            played += [result for result in results if result is not None]
            left = still_to_play(left, results)
        step = Stepped(
            version=version,
            training_s=self.trained.seconds,
            wall_s=time.monotonic() - self._began,
            reward=mean([result.reward for result in played]),
            exact=mean([result.exact for result in played]),
            episodes=len(played),
        )
        self.curve.steps.append(step)
        self.watcher.stepped(step)

    def _draw(self) -> list[GameTask]:
        """Draw distinct tasks for one batch, since all episodes of a task form one group."""
        drawn: dict[str, GameTask] = {}
        while len(drawn) < self.plan.batch_size:
            task = self.player.game.training(self._rng)
            drawn.setdefault(task.id, task)
        return list(drawn.values())

    async def measure(self) -> None:
        """Play the held-out tasks greedily, as evaluation episodes. The training clock is paused."""
        tasks = self.player.game.held_out()
        played: list[Played] = []
        version = 0
        for start in range(0, len(tasks), PLAYED_AT_ONCE_MAX):
            part = tasks[start : start + PLAYED_AT_ONCE_MAX]
            claimed = await self.player.claim(len(part), "eval")
            self.trained.pause()  # claims succeed only once the last batch is trained on and its weights loaded
            self.watcher.measuring(start, len(tasks))
            version = await self.player.client.get_global_step()
            results = await self.player.play(claimed, part, temperature=0.0)
            played += [result for result in results if result is not None]
        point = Measured(
            version=version,
            training_s=self.trained.seconds,
            reward=mean([result.reward for result in played]),
            exact=mean([result.exact for result in played]),
            kinds={kind: count / len(played) for kind, count in Counter(result.kind for result in played).items()},
        )
        self.curve.measured.append(point)
        self.watcher.measured(point)
