"""`bombus run`: plays ready-made tasks against any OpenAI-compatible server and scores them, without training."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping
from typing import Annotated

import httpx
import msgspec
from pydantic import Field

from bombus import task_groups
from bombus.commands.tasks.options import PlayOptions, add_play_arguments, flaw_of
from bombus.config.flags import Flag, add_settings_arguments, settings_from
from bombus.environments.rollout import Rollout
from bombus.errors import BombusError, Refused, in_one_line
from bombus.hive.episodes import KEY_PREFIX
from bombus.machine.certificates import certificates
from bombus.machine.host_names import is_loopback
from bombus.machine.process import TERMINATED, cancel_at_signals
from bombus.sdk.types import Credentials, Task
from bombus.tasks.kinds import TaskSet, TaskSplit
from bombus.tasks.playing import EpisodeScore, EpisodeSummary, ScoreFile, ServerPatience, TaskRun, table
from bombus.tasks.registry import open_tasks
from bombus.terminal import complain, escaped, say

ASK_S = 30.0  # time limit for the list of models
KEY_VARIABLE = "OPENAI_API_KEY"
NO_KEY = "none"  # for servers that require no key; an empty header would be malformed
HIVE = "bombus"  # the owner of the models that a hive lists
EPILOG = """\
example:
  bombus run --task reasoning_gym:leg_counting --engine http://127.0.0.1:8000/v1 -n 8

`bombus tasks` lists the names. The key comes from $OPENAI_API_KEY. docs/tasks.md has the rest.
"""


class RunOptions(PlayOptions):
    """The command line of `bombus run`."""

    split: TaskSplit = Field(
        default=TaskSplit.TRAIN, description="tasks to train on, or tasks that are never trained on"
    )
    model: Annotated[str, Flag(metavar="NAME", default="the first one that the server lists")] = Field(
        default="", description="the model that plays"
    )

    @property
    def base_url(self) -> str:
        url = self.engine.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_play_arguments(
        parser,
        task="the tasks, such as reasoning_gym:leg_counting; may be given several times",
        engine="an OpenAI-compatible server; /v1 is added if it is missing",
    )
    add_settings_arguments(parser, RunOptions)


def run(arguments: argparse.Namespace) -> int:
    options = settings_from(RunOptions, arguments, flags={"n": "-n"})
    opened: list[TaskSet] = []
    try:
        for name in dict.fromkeys(options.task):
            opened.append(open_tasks(name, options.options_for(name)))
        drawn = {one.name: options.draw(one) for one in opened}
        return task_groups.run(_play(options, opened, drawn))
    except Refused:
        raise
    except BombusError as error:
        complain(f"bombus run: {error}")
        return 1
    except asyncio.CancelledError:
        return TERMINATED
    finally:
        for one in opened:
            one.close()


async def _play(options: RunOptions, opened: list[TaskSet], drawn: Mapping[str, list[Task]]) -> int:
    cancel_at_signals()
    model = options.model or await _first_model(options.base_url)
    credentials = Credentials(base_url=options.base_url, api_key=_key(), model=model, episode_uuid="")
    for one in opened:
        if flaw := flaw_of(one.name):
            complain(f"bombus run: {one.name}: {flaw}")
    scores = ScoreFile(options.out) if options.out is not None else None
    patience = ServerPatience(lambda why: complain(f"bombus run: {why}"))
    board = RunBoard(scores, sum(map(len, drawn.values())) * options.repeat)
    try:
        for one in opened:
            rollout = Rollout(one.environment, options.budgets(one), sampling=options.sampling, watch=patience)
            play = TaskRun(one.name, rollout, credentials, board.report, options.at_once, patience)
            board.begin(one)
            await play.run(drawn[one.name], options.repeat)
    finally:
        board.close(model)
    return 0 if any(summary.rewards for summary in board.summaries) else 1


class RunBoard:
    """The printed output of a run: one progress line on a terminal, otherwise a line for each episode; then the
    table."""

    def __init__(self, scores: ScoreFile | None, total: int) -> None:
        self.summaries: list[EpisodeSummary] = []
        self._sets: list[TaskSet] = []
        self._scores = scores
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._is_terminal = sys.stdout.isatty()

    def begin(self, tasks: TaskSet) -> None:
        self.summaries.append(EpisodeSummary(tasks.name))
        self._sets.append(tasks)

    def report(self, score: EpisodeScore) -> None:
        self._done += 1
        self.summaries[-1].add(score)
        if self._scores is not None:
            self._scores.add(score)
        if not self._is_terminal:
            say(score.line(), flush=True)
            return
        rewards = [reward for summary in self.summaries for reward in summary.rewards]
        mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "-"
        sys.stdout.write("\r\x1b[2K" + escaped(f"{self._done}/{self._total} episodes, mean reward {mean}"))
        sys.stdout.flush()

    def close(self, model: str) -> None:
        """Print the table of the episodes that were played."""
        if self._is_terminal:
            sys.stdout.write("\r\x1b[2K")
        cut = "" if self._done == self._total else f" of {self._total}"
        say(
            "", f"{model}: {self._done}{cut} episodes in {time.monotonic() - self._began:.1f} s", *table(self.summaries)
        )
        for summary, tasks in zip(self.summaries, self._sets, strict=True):
            say(*summary.notes())
            if figures := tasks.figures():
                say(f"{tasks.name}: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
        if self._scores is not None:
            self._scores.close()


def _key() -> str:
    return os.environ.get(KEY_VARIABLE) or NO_KEY


class _Model(msgspec.Struct):
    id: str
    owned_by: object = None  # missing or null on some servers


class _Models(msgspec.Struct):
    data: list[_Model]


async def _first_model(base_url: str) -> str:
    """Return the first model that a server lists. Raises `BombusError` if the list is empty."""
    trusts = not is_loopback(httpx.URL(base_url).host)
    try:
        async with httpx.AsyncClient(timeout=ASK_S, trust_env=trusts, verify=certificates(trusts)) as client:
            response = await client.get(f"{base_url}/models", headers={"Authorization": f"Bearer {_key()}"})
        if response.status_code != 200:
            raise BombusError(
                f"{base_url}/models answered {response.status_code}: is it an OpenAI-compatible server, and is "
                f"${KEY_VARIABLE} its key? Or name the model with --model"
            )
        models = msgspec.json.decode(response.content, type=_Models).data
    except httpx.HTTPError as error:
        raise BombusError(f"{base_url} cannot be reached ({in_one_line(error)}): start a server there") from error
    except msgspec.MsgspecError as error:
        raise BombusError(f"{base_url}/models is not a list of models: name one with --model") from error
    if not models:
        raise BombusError(f"{base_url} serves no model: name one with --model")
    if models[0].owned_by == HIVE and not _key().startswith(KEY_PREFIX):
        raise BombusError(f"{base_url} is a hive, whose model answers only within episodes: use `bombus eval`")
    return models[0].id
