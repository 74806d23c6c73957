"""Runs in a notebook: their figures, episodes, calls and tokens as data frames, and their curves.

    import bombus.runs

    log = bombus.runs.open("my-run/hive")  # a data folder, an archive, or nats://...
    run = log.runs["main-1"]
    run.plot("reward")                     # shows in Jupyter
    run.episodes()                         # a data frame of polars or, without it, of pandas
    log.sql("SELECT task, avg(reward) FROM episodes GROUP BY task")

It needs the extra `sql`, and plots also `insight`: pip install 'bombus[sql,insight]'. Everything works in plain
programs and in notebooks, whose event loop is already running.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from bombus.commands.diagnose import lines_of
from bombus.insight.charts import Axis, Spec, plot
from bombus.insight.database import LogDatabase, read_samples, refusing
from bombus.insight.metrics import evaluation_metrics, step_metrics
from bombus.insight.runs import read_answers
from bombus.insight.tables import OF_EVENTS, TABLES, TableRow
from bombus.replay.diagnosis.diagnose import diagnose
from bombus.replay.diagnosis.findings import RunFinding
from bombus.replay.diagnosis.steps import RunSeries
from bombus.replay.opening import arguments_for, open_source
from bombus.replay.source import NotOnLog, Source

T = TypeVar("T")
WIDTH = 620  # of a plot, in pixels


def frame(table: pa.Table) -> Any:
    """Return a table of Arrow as a data frame of polars; if polars is not installed, of pandas; without both, as it is.

    `to_pandas()` makes a frame of pandas of each of them.
    """
    with suppress(ModuleNotFoundError):
        import polars

        return polars.from_arrow(table)
    with suppress(ModuleNotFoundError):
        return table.to_pandas()
    return table


class HiveLog:
    """A log that was read. `title` says which, and `runs` has the runs of its jobs by name, such as `main-2`, oldest
    first."""

    def __init__(self, log: str | Path, hive: str | None = None) -> None:
        """Open the log of a hive, and read its runs, episodes and calls.

        `log` is the data folder of a hive, running or stopped; an archive that `bombus log export` has written, or a
        folder of archives; or the address of a running hive's bus, such as `nats://127.0.0.1:4222`. `hive` is the name
        of the hive, if there are several.

        The log of a running hive is read up to its present end: open it again to see what was added. Nothing stays
        open: events, exact tokens and samples are read when they are asked for.

        Raises `NotOnLog` if there is no such log, and `BusUnavailable` if no bus answers.
        """
        self._arguments = arguments_for(str(log), hive)
        self.database = LogDatabase()

        async def load(source: Source) -> str:
            await self.database.load(source, OF_EVENTS - {"events"})
            return source.title

        self.title = self.read(load)
        found = self.database.runs
        self.runs = {} if found is None else {name: LogRun(self, series) for name, series in found.series.items()}

    def __repr__(self) -> str:
        return f"<{self.title}: {', '.join(self.runs) or 'no run of a job'}>"

    def sql(self, query: str, **parameters: object) -> Any:
        """Run a query in DuckDB's SQL and return its rows as a data frame. `$name` stands for a parameter.

            log.sql("FROM episodes WHERE task = $task ORDER BY reward", task="7+5")

        docs/sql.md has the tables and useful queries. The first query that names `events`, `answers`, `tokens` or
        `samples` reads all of that table, which may take a while. Raises `QueryRefused`, which says what is wrong with
        the query.
        """
        wanted = self.database.tables_in(query)
        if wanted - self.database.loaded:
            self.read(lambda source: self.database.load(source, wanted))
        return self.frame(query, parameters)

    def frame(self, query: str, parameters: dict[str, Any]) -> Any:
        """Return the rows of a query over what is loaded."""
        with refusing():
            return frame(self.database.relation(query, parameters).to_arrow_table())

    def read(self, work: Callable[[Source], Coroutine[Any, Any, T]]) -> T:
        """Open the log again and work on it, in a thread with an event loop of its own, since a notebook's is
        running."""

        async def opened() -> T:
            async with open_source(self._arguments) as source:
                return await work(source)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: asyncio.run(opened())).result()


class LogRun:
    """A run of a job, with its figures as `series`. Its methods return data frames (see `frame`), except for `diagnose`
    and `plot`."""

    def __init__(self, log: HiveLog, series: RunSeries) -> None:
        self.log = log
        self.name = series.name
        self.series = series

    def __repr__(self) -> str:
        return f"<run {self.name} of {self.log.title}: {len(self.series.steps)} steps>"

    def metrics(self) -> Any:
        """Return the figures of the run: a row for each step, and a column for each figure, such as `reward/mean`.

        They are the figures that the page, reports and trackers show. What is not known of a step is null.
        """
        return _wide("step", {row.step: step_metrics(row) for row in self.series.steps})

    def evaluations(self) -> Any:
        """Return the figures of evaluations: a row for each policy version, with columns such as `held_out/mean` and,
        if tasks report success, `held_out/pass@1`."""
        return _wide("version", evaluation_metrics(self.series.evaluated))

    def episodes(self) -> Any:
        """Return the episodes in the order of their claims: who played them, their rewards, and what became of
        them."""
        return self.log.sql("FROM episodes WHERE run = $run ORDER BY claimed, episode", run=self.name)

    def calls(self) -> Any:
        """Return the recorded calls in order: their lengths, policy versions and outcomes, without their tokens."""
        return self.log.sql("FROM calls WHERE run = $run ORDER BY seq, place", run=self.name)

    def tokens(self, episode: str) -> Any:
        """Return the exact tokens that were sampled in an episode: their ids, logprobs and policy versions, and whether
        a step has trained on them.

        Calls that are no longer kept have no rows. Raises `NotOnLog` if the episode has no calls.
        """
        if not len(self.log.sql("FROM calls WHERE episode = $episode LIMIT 1", episode=episode)):
            raise NotOnLog(f"{self.log.title} has no calls of an episode {episode}")
        self.log.read(lambda source: self.log.database.load(source, {"tokens"}, episode))
        return self.log.frame(
            "SELECT t.* FROM tokens t JOIN calls c USING (run, episode, call) WHERE episode = $episode"
            " ORDER BY place, choice, position",
            {"episode": episode},
        )

    def samples(self, step: int) -> Any:
        """Return the sequences that a step trained on, with masks, logprobs and advantages, as `bombus replay batch`
        writes them.

        Raises `NotOnLog` if there is no such step, and `NotInstalled` without the extra `trainer`.
        """
        rows: list[TableRow] = []
        self.log.read(lambda source: read_samples(source, self.name, lambda _, found: rows.extend(found), (step,)))
        return frame(pa.Table.from_batches([TABLES["samples"].batch(rows)]))

    def diagnose(self) -> "RunDiagnosis":
        """Return what is wrong with the learning of this run. It is shown as `bombus diagnose` prints it."""

        self.log.read(lambda source: read_answers(source, self.series.steps))
        return RunDiagnosis(self.series, self.log.title)

    def plot(self, figure: str, axis: Axis = "step") -> "RunPlot":
        """Return a chart that Jupyter shows.

        `figure` is one of the charts of the page, such as `reward`, `held_out`, `length` or `time`, or one column of
        `metrics` or `evaluations`, such as `reward/success_rate`. `axis` is `step`, `version`, `minutes` or `tokens`.
        Raises `NoSuchFigure`.
        """
        return RunPlot(figure, self, axis=axis)


class RunDiagnosis:
    """What is wrong with the learning of a run. `findings` is empty if nothing was found."""

    def __init__(self, series: RunSeries, title: str) -> None:
        self.findings: list[RunFinding] = diagnose(series.steps, series.job)
        self._lines = lines_of(series, self.findings, title)

    def __repr__(self) -> str:
        return "\n".join(self._lines)


class RunPlot:
    """A chart of one or several runs. Jupyter draws its `spec`, which is Vega-Lite's, or shows it as a picture."""

    def __init__(self, figure: str, *runs: LogRun, axis: Axis = "step") -> None:
        """Draw runs of the same log or of others, each in a colour of its own.

        `figure` and `axis` are those of `LogRun.plot`. Raises `NoSuchFigure` if none of the runs has the figure.
        """
        names = [run.name for run in runs]
        labels = [run.name if names.count(run.name) == 1 else f"{run.log.title}: {run.name}" for run in runs]
        self.spec: Spec = plot(figure, dict(zip(labels, (run.series for run in runs))), axis, WIDTH)

    def svg(self) -> str:
        """Return the chart as SVG. Raises `ModuleNotFoundError` without the extra `insight`."""
        import vl_convert

        return str(vl_convert.vegalite_to_svg(self.spec))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        bundle = {"text/plain": self.spec["description"], "application/vnd.vegalite.v6+json": self.spec}
        try:
            return bundle | {"image/svg+xml": self.svg()}
        except ModuleNotFoundError:
            return bundle


open, compare = HiveLog, RunPlot


def _wide(key: str, rows: dict[int, dict[str, float]]) -> Any:
    """Return figures as a frame with a row for each step or version, and a column for each name."""
    names = sorted({name for row in rows.values() for name in row})
    columns = {name: pa.array([row.get(name) for row in rows.values()], pa.float64()) for name in names}
    return frame(pa.table({key: pa.array(rows, pa.int64()), **columns}))
