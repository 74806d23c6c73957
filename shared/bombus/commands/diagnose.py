"""`bombus diagnose`: says in plain words what is wrong with the learning in a run, and what to try."""

import argparse

import msgspec

from bombus.insight.runs import add_run_argument, read_answers, read_runs
from bombus.replay.diagnosis.diagnose import diagnose
from bombus.replay.diagnosis.findings import BEFORE_MIN, NEAR_BEST, WINDOW, RunFinding, reward_bounds, reward_of
from bombus.replay.diagnosis.statistics import VISIBLE, change, mean
from bombus.replay.diagnosis.steps import RunSeries
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import run_on_source
from bombus.replay.source import Source
from bombus.terminal import say, say_json

DESCRIPTION = """Says what is wrong with the learning of a run: the figure that shows it, since which step, and what to
try. It needs only the log: the hive may be running or stopped. The exit status is 0 if nothing is found, and 1 if
something is, or if the log or the run cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add_run_argument(parser)
    add_source_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    found: list[RunFinding] = []

    async def show(source: Source, arguments: argparse.Namespace) -> None:
        series = (await read_runs(source)).newest(arguments.name, source.title)
        await read_answers(source, series.steps)
        found.extend(diagnose(series.steps, series.job))
        if arguments.json:
            findings = msgspec.to_builtins(found)
            say_json({"run": series.name, "steps": len(series.steps), "findings": findings})
        else:
            say(*lines_of(series, found, source.title))

    code = run_on_source("bombus diagnose", show, arguments)
    return code or int(bool(found))


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
