"""Checks a plain class before training on it: gold solution, reward ranges, determinism, isolation and leaks."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from bombus.environments.kinds import RolloutScores
from bombus.environments.plain.description import PlainClass
from bombus.environments.plain.environment import PlainEnvironment
from bombus.environments.plain.leaks import footprint, left_behind
from bombus.environments.plain.trial import GoldSolution, Trial, carried_out, tried, tried_play
from bombus.errors import BombusError, with_place
from bombus.sdk.running import contained
from bombus.sdk.types import Task

CHECK_S = 120.0
SLACK = 1e-6  # tolerance for comparing rewards


class CheckedTask(msgspec.Struct, frozen=True, kw_only=True):
    """The problems that one check found with a task, as sentences. `skipped` is why the check was not made, if it was
    not.

    `warning` is a sentence about something that may be intentional, and does not fail the check.
    """

    check: str
    problems: tuple[str, ...] = ()
    skipped: str = ""
    detail: str = ""
    warning: str = ""


class ClassValidation:
    """Validates the class that `description` describes. With `needs_gold`, a class without a gold solution fails."""

    def __init__(self, kind: type, description: PlainClass, *, needs_gold: bool = False) -> None:
        self._kind = kind
        self._description = description
        self._needs_gold = needs_gold
        self._has_gold = description.has_gold

    async def check(self, task: Task) -> list[CheckedTask]:
        """Return the findings of each check. If the task cannot be played at all, return only that finding."""
        try:
            async with asyncio.timeout(CHECK_S):
                nothing, best = await contained(self._trials(task))
        except Exception as error:  # any error in the class's own code is the finding
            return [CheckedTask(check="plays", problems=(f"It cannot be played: {_said(error)}.",))]
        return [
            CheckedTask(
                check="plays",
                detail=f"reward {nothing.scores.reward:g} for doing nothing",
                warning=_warning_of(nothing.scores),
            ),
            self._gold(nothing, best),
            CheckedTask(check="range", problems=tuple(dict.fromkeys([*self._outside(nothing), *self._outside(best)]))),
            await self._again("determinism", self._determinism(task, best)),
            await self._again("isolation", self._isolation(task, nothing, best)),
            await self._again("leaks", self._leaks(task)),
        ]

    async def _again(self, name: str, problems: AsyncIterator[str]) -> CheckedTask:
        if name == "isolation" and self._description.plays:
            return CheckedTask(check=name, skipped="an episode of a class with `play` cannot be paused")
        try:
            async with asyncio.timeout(CHECK_S):
                return CheckedTask(check=name, problems=await contained(_all(problems)))
        except Exception as error:  # any error in the class's own code
            return CheckedTask(check=name, problems=(f"It could not be played again: {_said(error)}.",))

    @asynccontextmanager
    async def _environment(self) -> AsyncIterator[PlainEnvironment]:
        environment = PlainEnvironment(self._kind)
        try:
            yield environment
        finally:
            await environment.close()

    async def _trials(self, task: Task) -> tuple[Trial, Trial]:
        nothing = await self._trial(task, gold=False)
        return nothing, await self._trial(task, gold=True) if self._has_gold else nothing

    async def _trial(self, task: Task, *, gold: bool) -> Trial:
        async with self._environment() as environment:
            if self._description.plays:
                return await tried_play(environment, task, gold=gold)
            return await tried(environment, task, gold=gold)

    # ---- the checks ---------------------------------------------------------------------------------------------

    def _gold(self, nothing: Trial, best: Trial) -> CheckedTask:
        if not self._has_gold:
            if self._needs_gold:
                return CheckedTask(check="gold", problems=("It has no `gold(self, task)`, which --gold needs.",))
            return CheckedTask(check="gold", skipped="it has no `gold`")
        problems = [f"A call of the gold solution failed: {each.text}." for each in best.outcomes if each.failed]
        if best.scores.is_success is False:
            problems.append("The gold solution does not count as a success.")
        if best.scores.reward <= nothing.scores.reward + SLACK:
            problems.append(
                f"The gold solution earns {best.scores.reward:g}, but doing nothing "
                f"earns {nothing.scores.reward:g}, so there is nothing to learn."
            )
        return CheckedTask(check="gold", problems=tuple(problems), detail=f"reward {best.scores.reward:g}")

    def _outside(self, trial: Trial) -> Iterator[str]:
        """Yield a sentence for each reward that was outside its declared range."""
        for method in self._description.rewards:
            mark, declared = method.mark, f"{method.mark.low:g} to {method.mark.high:g}"
            given = trial.numbers.get(method.name, [trial.scores.rewards[method.name]])
            for value in (each for each in given if not mark.low - SLACK <= each <= mark.high + SLACK):
                yield f"The reward `{method.name}` was {value:g}, but its declared range is {declared}."

    async def _determinism(self, task: Task, best: Trial) -> AsyncIterator[str]:
        again = await self._trial(task, gold=self._has_gold)
        for each in _differences(best, again):
            yield f"On a second run, {each}."

    async def _isolation(self, task: Task, nothing: Trial, best: Trial) -> AsyncIterator[str]:
        """Play one instance while another is open. Yield a sentence for each way in which the open one is affected."""
        async with self._environment() as one, self._environment() as other:
            opening = await other.open(task)
            await tried(one, task, gold=self._has_gold)
            noticed = await carried_out(other, opening.messages, GoldSolution())
            for each in _differences(nothing, noticed):
                yield f"While another instance was being played, {each}."
            for each in _differences(best, await tried(other, task, gold=self._has_gold)):
                yield f"When it was reset after another instance was played, {each}."

    async def _leaks(self, task: Task) -> AsyncIterator[str]:
        with _temporary_folder() as folder:
            folders = (folder, Path.cwd())
            before = footprint(*folders)
            await self._trial(task, gold=self._has_gold)
            for what in await left_behind(before, *folders):
                yield f"After `close`, it leaves behind {what}."


def _warning_of(nothing: RolloutScores) -> str:
    """Return a warning if an empty answer without tool calls earns a reward or counts as success, else ""."""
    if nothing.reward <= SLACK and not nothing.is_success:
        return ""
    how = "counts as a success" if nothing.is_success else f"earns a reward of {nothing.reward:g}"
    return (
        f"Doing nothing {how}: a policy may learn to do nothing. Unless the task is to refrain from something, reward "
        "what was done"
    )


async def _all(problems: AsyncIterator[str]) -> tuple[str, ...]:
    return tuple([each async for each in problems])


def _differences(first: Trial, second: Trial) -> Iterator[str]:
    """Yield a clause for each difference between two trials that should be the same."""
    if first.messages != second.messages:
        yield "it began with different messages"
    for number, (before, after) in enumerate(zip(first.outcomes, second.outcomes), 1):
        if before != after:
            yield f"call {number} of the gold solution gave {after.text!r} instead of {before.text!r}"
            break
    for name, value in first.scores.rewards.items():
        other = second.scores.rewards[name]
        if abs(value - other) > SLACK:
            yield f"the reward `{name}` was {other:g} instead of {value:g}"
    if first.scores.is_success != second.scores.is_success:
        yield f"its success was {second.scores.is_success} instead of {first.scores.is_success}"


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Redirect temporary files to a new folder while the block runs."""
    earlier, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = earlier
            os.environ.pop("TMPDIR")
            if variable is not None:
                os.environ["TMPDIR"] = variable


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it took longer than {CHECK_S:g} s"
    return str(error) if isinstance(error, BombusError) else with_place(error)
