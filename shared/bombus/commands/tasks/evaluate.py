"""`bombus eval`: plays tasks with the policy that a hive trains, once or after every Nth version, without training."""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from bombus import task_groups
from bombus.commands.tasks.options import PlayOptions, add_play_arguments, flaw_of
from bombus.config.flags import Flag, add_settings_arguments, settings_from
from bombus.environments.rollout import Rollout
from bombus.errors import BombusError, Code, Refused
from bombus.machine.process import TERMINATED, cancel_at_signals
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.errors import BadRequest, EngineOffline, SwarmError, Unauthorized
from bombus.sdk.transport import address
from bombus.tasks.evaluating import EvalSchedule, EvalScore, EvalSet, Evaluation, wait_until_due
from bombus.tasks.files import SUFFIX, FileTasks
from bombus.tasks.kinds import TaskSet, TaskSplit
from bombus.tasks.playing import EpisodeSummary, ScoreFile, ServerFailed, table
from bombus.tasks.registry import open_tasks
from bombus.terminal import complain, say

EPILOG = """\
examples:
  bombus eval --task reasoning_gym:leg_counting --engine http://127.0.0.1:10086 -n 32
  bombus eval --task held_out.jsonl --env my_env:Counter --engine http://127.0.0.1:10086 --every 5

The hive's key comes from $BOMBUS_CLIENT_KEY or $BOMBUS_ADMIN_KEY. docs/tasks.md has the rest.
"""


class EvalOptions(PlayOptions):
    """The command line of `bombus eval`."""

    split: TaskSplit = Field(
        default=TaskSplit.EVAL, description="tasks to train on, or tasks that are never trained on"
    )
    env: Annotated[str, Flag(metavar="MODULE:CLASS", default="none")] = Field(
        default="", description="the environment class that plays the tasks of a file"
    )
    claim: int = Field(
        default=64,
        ge=1,
        le=1024,
        description="how many episodes are claimed together, and so play one version; training waits for them. At most "
        "the job's rollout.max_env_worker",
    )
    every: Annotated[int | None, Flag(default="once")] = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="keep running, and evaluate after every Nth policy version until Ctrl-C",
    )

    @field_validator("engine")
    @classmethod
    def _is_a_hive(cls, given: str) -> str:
        address(given, "")
        return given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_play_arguments(
        parser,
        task=f"the tasks, such as reasoning_gym:leg_counting, or a file that ends in {SUFFIX}; may be given several "
        "times",
        engine="the hive, whose first engine plays; with /e/NAME at its end, the engine of that name",
    )
    add_settings_arguments(parser, EvalOptions)


def run(arguments: argparse.Namespace) -> int:
    options = settings_from(EvalOptions, arguments, flags={"n": "-n"})
    opened: list[TaskSet] = []
    try:
        for name in dict.fromkeys(options.task):
            opened.append(_opened(options, name))
            if any(one.name == opened[-1].name for one in opened[:-1]):
                why = f"two data sets are named {opened[-1].name}: give one of the files another name"
                raise Refused(Code.BAD_CONFIG, why)
        return task_groups.run(_evaluate(options, opened))
    except Refused:
        raise
    except EngineOffline as error:
        complain(f"bombus eval: {error}", "Start a job first, with `bombus rollout --job` or a client.")
    except BombusError as error:
        complain(f"bombus eval: {error}")
    except asyncio.CancelledError:
        return TERMINATED
    finally:
        for one in opened:
            one.close()
    return 1


def _opened(options: EvalOptions, name: str) -> TaskSet:
    chosen = options.options_for(name)
    if name.endswith(SUFFIX):
        return FileTasks(Path(name), options.env)
    tasks = open_tasks(name, chosen)
    if flaw := flaw_of(name):
        complain(f"bombus eval: {name}: {flaw}")
    return tasks


def _eval_set(options: EvalOptions, tasks: TaskSet) -> EvalSet:
    drawn = options.draw(tasks)
    rollout = Rollout(tasks.environment, options.budgets(tasks), sampling=options.sampling)
    return EvalSet(name=tasks.name, tasks=drawn, rollout=rollout)


async def _evaluate(options: EvalOptions, opened: Sequence[TaskSet]) -> int:
    cancel_at_signals()
    data_sets = [_eval_set(options, one) for one in opened]
    scores = ScoreFile(options.out) if options.out is not None else None
    try:
        async with AsyncSwarmClient(options.engine, verbose=False) as client:
            if options.every is None:
                board = EvalBoard(options, client, scores)
                await board.play(data_sets)
                return 0 if board.has_rewards else 1
            return await _follow(options, options.every, client, data_sets, scores)
    finally:
        if scores is not None:
            scores.close()


async def _follow(
    options: EvalOptions, every: int, client: AsyncSwarmClient, data_sets: Sequence[EvalSet], scores: ScoreFile | None
) -> int:
    """Evaluate repeatedly until the engine is no longer running. A failed pass does not stop the loop."""
    schedule = EvalSchedule(every)
    has_rewards = False
    while (due := await wait_until_due(client, schedule)) is not None:
        run, version = due
        board = EvalBoard(options, client, scores)
        try:
            await board.play(data_sets)
        except (BadRequest, Unauthorized):
            raise  # the next pass would be refused too
        except (ServerFailed, SwarmError) as error:
            complain(f"bombus eval: version {version}: {error}", "The next version will still be evaluated.")
        has_rewards |= board.has_rewards
        if skipped := schedule.played(run, next(iter(board.evaluation.versions), version)):
            names = ", ".join(map(str, skipped[:8])) + (" and more" if len(skipped) > 8 else "")
            say(f"skipped, because evaluation is slower than training: version {names}", flush=True)
    say("the engine is no longer running")
    return 0 if has_rewards else 1


class EvalBoard:
    """Prints one pass: a line for each episode, then a table by data set and version."""

    def __init__(self, options: EvalOptions, client: AsyncSwarmClient, scores: ScoreFile | None) -> None:
        self.evaluation = Evaluation(client, self._report, at_once=options.at_once, claim=options.claim)
        self._repeat = options.repeat
        self._scores = scores
        self._summaries: dict[tuple[str, int, int], EpisodeSummary] = {}
        self._began = time.monotonic()

    @property
    def has_rewards(self) -> bool:
        return any(summary.rewards for summary in self._summaries.values())

    async def play(self, data_sets: Sequence[EvalSet]) -> None:
        """Play all data sets once. The results so far are printed even if the pass is interrupted."""
        try:
            await self.evaluation.play(data_sets, self._repeat)
        finally:
            self._close()

    def _report(self, score: EvalScore) -> None:
        oldest, newest = score.versions[0], score.versions[-1]
        key = (score.tasks, oldest, newest)
        if key not in self._summaries:
            sampled_by = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest} together"
            self._summaries[key] = EpisodeSummary(f"{score.tasks}, {sampled_by}")
        self._summaries[key].add(score)
        if self._scores is not None:
            self._scores.add(score)
        say(score.line(), flush=True)

    def _close(self) -> None:
        """Print the table of the episodes that were played."""
        if not self._summaries:
            return
        summaries = list(self._summaries.values())
        versions = sorted({version for _, *sampled_by in self._summaries for version in sampled_by})
        count = sum(len(each.rewards) + each.aborted.total() for each in summaries)
        played = f"policy version {', '.join(map(str, versions))}"
        say("", f"{played}: {count} episodes in {time.monotonic() - self._began:.1f} s", *table(summaries))
        for summary in summaries:
            say(*summary.notes())
        if self.evaluation.cut_off:
            say(
                f"{self.evaluation.cut_off} episodes have no reward because the hive closed them: a batch waits for "
                "collection.drain_s at most; with a larger --at-once, or a smaller -n, more of them end in time"
            )
        if len(versions) > 1:
            say("the policy changed meanwhile: each row covers episodes sampled by one version, or by several together")
        if len(self.evaluation.versions) > 1:
            say("with a larger --claim, more episodes play the same version")
        say("", flush=True)
