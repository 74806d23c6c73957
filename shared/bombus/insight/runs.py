"""The runs of a log that train on jobs, each folded into figures by step."""

import argparse
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from bombus.config.job import RunConfig
from bombus.errors import LogCorrupted
from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.checkpoints import where_begun
from bombus.hive.records import unpack_tokens
from bombus.hive.state import EngineState, Hive, Phase
from bombus.replay.diagnosis.answers import SampledAnswer, figures_of
from bombus.replay.diagnosis.steps import RunSeries, StepFigures
from bombus.replay.logged_run import is_trained_elsewhere
from bombus.replay.source import NotOnLog, Source

ANSWERS_READ = 128  # number of newest steps whose answers are read: each takes 0.1 s if they are long
RUNS_KEPT = 100  # the newest runs; each has up to 8 MB
_STATES: dict[type, str] = {
    ev.EngineStopped: "stopped",
    ev.EngineFailed: "failed",
    ev.EngineSuspended: "suspended",
    ev.EngineResumed: "running",
}
OF_RUNS = frozenset({ev.EngineConfigured, ev.EngineStarted, *_STATES})


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a run, as `Runs.newest` understands it."""
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="RUN",
        help="main-2, or main for the newest run of this engine (default: the newest run of the only engine)",
    )


class Runs:
    """The figures of every run of a job as `series`, keyed by names such as `main-2`, oldest first, and the rows of all
    runs in the table `runs`. `note` folds events in order; for the rows alone, those of `OF_RUNS` are enough.

    `hive` is the state before the first event that is noted.
    """

    def __init__(self, hive: Hive) -> None:
        self.series: dict[str, RunSeries] = {}
        self.rows: dict[str, dict[str, Any]] = {}  # the newest of an engine is the last
        self._configured: dict[str, ev.EngineConfigured | None] = {}
        self._current: dict[str, RunSeries] = {}  # by engine
        for state in hive.engines.values():
            self._configured[state.name] = state.active or state.configured
            if state.started is not None:
                self._begin(0, state.started)
                self.rows[f"{state.name}-{state.started.run}"] |= _stands(state)
            self._configured[state.name] = state.configured

    def note(self, seq: int, event: ev.AnyEvent) -> None:
        kind = type(event)
        if kind not in OF_RUNS:
            if (series := self._current.get(event.engine)) is not None:
                series.note(seq, event)
        elif isinstance(event, ev.EngineConfigured):
            self._configured[event.engine] = event
        elif isinstance(event, ev.EngineStarted):
            self._begin(seq, event)
        elif (row := self._newest_row(event.engine)) is not None:
            state = _STATES[kind]
            ended = event.at_ns if state in ("stopped", "failed") else None
            row |= {"state": state, "reason": getattr(event, "reason", None), "ended": ended}

    def _newest_row(self, engine: str) -> dict[str, Any] | None:
        return next((row for row in reversed(self.rows.values()) if row["engine"] == engine), None)

    def _begin(self, seq: int, started: ev.EngineStarted) -> None:
        self._current.pop(started.engine, None)
        before = self._newest_row(started.engine)
        if before is not None and before["ended"] is None:
            before |= {"state": "over", "ended": started.at_ns}
        config = self._configured.get(started.engine)
        kind = "outside" if is_trained_elsewhere(started) else "operations" if started.base else "job"
        run = f"{started.engine}-{started.run}"
        row = {"run": run, "engine": started.engine, "number": started.run, "kind": kind, "state": "running"}
        row |= {"started": started.at_ns or None, "ended": None, "begun": where_begun(started) or None}
        self.rows[run] = row | {"model": started.base or None}
        if config is None or kind != "job":
            return
        self.rows[run] |= {"model": config.model, "config": config.config}
        series = RunSeries(started.engine, started.run, RunConfig.from_json(config.config))
        series.started_ns, series.started_seq = started.at_ns, seq
        self._current[started.engine] = self.series[series.name] = series
        trim(self.series, RUNS_KEPT)

    def newest(self, name: str, title: str) -> RunSeries:
        """Return the run called `name`, or the newest run of the engine called `name`, or of the only engine if "".

        Raises `NotOnLog`, whose message calls the log `title`, if there is no such run or if the engine is unclear.
        """
        found = {each.engine: each for each in self.series.values() if name in ("", each.engine, each.name)}
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            raise NotOnLog(f"{title} has several engines: name one of {', '.join(sorted(found))}")
        if self.series:
            raise NotOnLog(f"{title} has no run or engine {name}; its runs are {', '.join(self.series)}")
        raise NotOnLog(
            f"{title} has no run of a job. Training operations and outside trainers make no steps that could be "
            "shown: `bombus replay timeline` shows what they did"
        )


def _stands(state: EngineState) -> dict[str, Any]:
    """Return how the newest run of an engine stands, as its row says it."""
    if state.phase == Phase.OFFLINE:
        reached = "failed" if state.failure else "stopped"
        return {"state": reached, "reason": state.failure or None, "ended": state.phase_since_ns}
    return {"state": "suspended", "reason": state.suspended} if state.suspended else {}


async def read_runs(source: Source) -> Runs:
    """Read the runs of a log. Raises `LogCorrupted`."""
    hive, position = await source.base()
    runs = Runs(hive)
    async with aclosing(source.events(position)) as entries:
        async for entry in entries:
            runs.note(entry.seq, entry.event)
    return runs


async def read_answers(source: Source, steps: Sequence[StepFigures]) -> None:
    """Read the sampled answers of the newest of these steps. Steps whose calls are no longer kept get none."""
    for figures in steps[-ANSWERS_READ:]:
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
