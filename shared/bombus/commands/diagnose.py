"""`bombus diagnose`: says in plain words what is wrong with the learning in a run, and what to try."""

import argparse
from contextlib import aclosing

import msgspec

from bombus.config.job import RunConfig
from bombus.errors import LogCorrupted
from bombus.hive import events as ev
from bombus.hive.records import unpack_tokens
from bombus.replay.diagnosis.answers import SampledAnswer, figures_of
from bombus.replay.diagnosis.diagnose import diagnose
from bombus.replay.diagnosis.findings import BEFORE_MIN, NEAR_BEST, WINDOW, RunFinding, reward_bounds, reward_of
from bombus.replay.diagnosis.statistics import VISIBLE, change, mean
from bombus.replay.diagnosis.steps import RunSeries
from bombus.replay.logged_run import is_trained_elsewhere
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import run_on_source
from bombus.replay.source import Logged, NotOnLog, Source
from bombus.terminal import say, say_json

DESCRIPTION = """Says what is wrong with the learning of a run: the figure that shows it, since which step, and what to
try. It needs only the log: the hive may be running or stopped. The exit status is 0 if nothing is found, and 1 if
something is, or if the log or the run cannot be read."""
ANSWERS_READ = 128  # number of newest steps whose answers are read: each takes 0.1 s if they are long


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="RUN",
        help="main-2, or main for the newest run of this engine (default: the newest run of the only engine)",
    )
    add_source_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    found: list[RunFinding] = []

    async def show(source: Source, arguments: argparse.Namespace) -> None:
        series = await read_series(source, arguments.name)
        await read_answers(source, series)
        found.extend(diagnose(series.steps, series.job))
        if arguments.json:
            findings = msgspec.to_builtins(found)
            say_json({"run": series.name, "steps": len(series.steps), "findings": findings})
        else:
            say(*lines_of(series, found, source.title))

    code = run_on_source("bombus diagnose", show, arguments)
    return code or int(bool(found))


async def read_series(source: Source, name: str) -> RunSeries:
    """Read the steps of a run, or of an engine's newest run; `name` is that of the run or the engine.

    Raises `NotOnLog` unless exactly one run is found, and `LogCorrupted` if an event cannot be read.
    """
    hive, position = await source.base()
    found = FoundRuns(name)
    for state in hive.engines.values():
        found.configured[state.name] = state.active or state.configured
        if state.started is not None:
            found.begin(state.started)
        found.configured[state.name] = state.configured
    async with aclosing(source.events(position)) as entries:
        async for entry in entries:
            found.note(entry)
    return found.chosen(source.title)


class FoundRuns:
    """The newest run of each engine that matches a name, and the names of all runs of jobs."""

    def __init__(self, name: str) -> None:
        self.configured: dict[str, ev.EngineConfigured | None] = {}
        self._name = name
        self._series: dict[str, RunSeries] = {}
        self._runs: list[str] = []

    def note(self, entry: Logged) -> None:
        event = entry.event
        if isinstance(event, ev.EngineConfigured):
            self.configured[event.engine] = event
        elif isinstance(event, ev.EngineStarted):
            self.begin(event)
        elif event.engine in self._series:
            self._series[event.engine].note(entry.seq, event)

    def begin(self, started: ev.EngineStarted) -> None:
        config = self.configured.get(started.engine)
        if config is None or started.base or is_trained_elsewhere(started):
            return
        series = RunSeries(started.engine, started.run, RunConfig.from_json(config.config))
        self._runs.append(series.name)
        if self._name in ("", series.engine, series.name):
            self._series[series.engine] = series

    def chosen(self, title: str) -> RunSeries:
        """Return the run that was found. Raises `NotOnLog` if none or several were found."""
        if len(self._series) == 1:
            return next(iter(self._series.values()))
        if self._series:
            raise NotOnLog(f"{title} has several engines: name one of {', '.join(sorted(self._series))}")
        if self._runs:
            raise NotOnLog(f"{title} has no run or engine {self._name}; its runs are {', '.join(self._runs)}")
        raise NotOnLog(
            f"{title} has no run of a job. Training operations and outside trainers make no steps that could be "
            "diagnosed: `bombus replay timeline` shows what they did"
        )


async def read_answers(source: Source, series: RunSeries) -> None:
    """Read the sampled answers of the newest steps. A step whose calls have been removed gets no answers."""
    for figures in series.steps[-ANSWERS_READ:]:
        try:
            records = await source.records([call for _, _, call in figures.sampled])
        except LogCorrupted:  # the calls were purged, or are not in this archive
            continue
        answers = [
            SampledAnswer(
                task, reward, unpack_tokens(record.prompt_tail), record.choices[0].token_ids(), record.parent is None
            )
            for (task, reward, _), record in zip(figures.sampled, records, strict=True)
            if record.choices
        ]
        figures.answers = figures_of(answers)


def _progress(series: RunSeries) -> list[str]:
    """Return lines about a reward that has not risen, since a run that learns nothing may have a fault that no rule
    looks for."""
    rewards = [reward for row in series.steps if (reward := reward_of(row)) is not None]
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    least, most = reward_bounds(series.steps)
    is_good = mean(last) > least + NEAR_BEST * (most - least)
    if len(rewards) < WINDOW + BEFORE_MIN or is_good or change(first, last) > VISIBLE:
        return []
    return [
        f"But the mean reward has not risen: {mean(first):.3g} in the first {WINDOW} steps, {mean(last):.3g} in the "
        "last. docs/reward.md says where to look."
    ]


def lines_of(series: RunSeries, findings: list[RunFinding], title: str) -> list[str]:
    if not series.steps:
        return [f"{title}: {series.name} has completed no step: `bombus why` says what it waits for"]
    shown = [f"{title}: {series.name}, steps {series.steps[0].step} to {series.steps[-1].step}"]
    if not findings:
        shown += ["", "No problem was found. docs/diagnose.md says what this looks for, and how often it misses it."]
        shown += _progress(series)
    for finding in findings:
        shown += ["", f"{finding.kind.in_words}: {finding.figure}"]
        shown.append(f"  from step {finding.step} (event {finding.seq}), last seen at step {finding.until}")
        shown.append(f"  try: {finding.advice}")
        if finding.consequences:
            followed = (f"{each.kind.in_words} (step {each.step})" for each in finding.consequences)
            shown.append(f"  this explains: {', '.join(followed)}")
    return shown
