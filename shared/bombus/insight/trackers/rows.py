"""What trackers are given: a run, and one row of figures for each of its completed steps. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from bombus.config.job import RunConfig
from bombus.hive import events as ev
from bombus.hive.checkpoints import UNNAMED
from bombus.hive.records import CallRecord, hasher
from bombus.hive.state import Hive
from bombus.insight.metrics import evaluation_metrics, step_metrics
from bombus.insight.runs import Runs
from bombus.replay.diagnosis.steps import RunSeries

NAME_MAX = 100  # characters of a project, a run or a folder
METRIC_MAX = 200  # characters of a figure's name
TEXT_MAX = 4_000  # characters of a setting or of a sampled text
VERSION = "held_out/version"  # the policy version whose evaluation is in a row
_FORBIDDEN = re.compile(r"[^0-9A-Za-z_.+-]")
_FORBIDDEN_IN_METRIC = re.compile(r"[^\w.@ -]", re.ASCII)


class ShownSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled answer: the last turn of an episode in a batch."""

    task: str
    reward: float
    prompt: str
    answer: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a completed step, and of one evaluated policy version: the oldest with episodes in no row yet.

    If a run ends with evaluations after its last step, more rows, whose steps are the next numbers, have one each.
    """

    step: int
    at_ns: int
    metrics: dict[str, float]
    samples: tuple[ShownSample, ...] = ()


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as trackers see it. `id` is different for each run of any hive, and for each project and name that a run is
    written to."""

    id: str
    hive: str
    engine: str
    run: int
    project: str
    name: str
    digest: str  # of the job
    config: dict[str, Any]  # the job's settings, by names such as `trainer.lr`

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        return plain(f"{self.hive}-{self.engine}-{self.run}") + f"-{self.id}"

    @property
    def tags(self) -> dict[str, str]:
        return {"hive": self.hive, "engine": self.engine, "run": str(self.run), "digest": self.digest, "id": self.id}


def tracked(hive: str, series: RunSeries, project: str = "", name: str = "") -> TrackedRun:
    """Return a run as trackers see it. `project` and `name` replace those of the job."""
    job = series.job
    given = job.experiment.experiment_name
    title = name or (series.name if given == UNNAMED else f"{given}-{series.name}")
    project, title = plain(project or job.experiment.project_name), plain(title)
    identity = "\n".join((hive, series.name, str(series.started_ns), project, title))
    return TrackedRun(
        id=hasher(identity.encode()).hexdigest()[:12],
        hive=hive,
        engine=series.engine,
        run=series.run,
        project=project,
        name=title,
        digest=job.digest,
        config=flat_config(job),
    )


def flat_config(job: RunConfig) -> dict[str, Any]:
    """Return a job's settings by names such as `trainer.lr`. A job has no secrets; long texts are cut."""
    groups: dict[str, dict[str, Any]] = job.model_dump(mode="json")
    found = {f"{group}.{field}": value for group, fields in groups.items() for field, value in fields.items()}
    return {name: value[:TEXT_MAX] if isinstance(value, str) else value for name, value in found.items()}


def plain(text: str) -> str:
    """Return a name that every tracker accepts, and that is the name of one file: no separators, no markup."""
    return _FORBIDDEN.sub("_", text)[:NAME_MAX].lstrip(".-") or "_"


def plain_metrics(metrics: Mapping[str, float], at: str = "@") -> dict[str, float]:
    """Return figures under names that every tracker accepts.

    A name that has to be changed ends in a digest, so that two names never become one. `at` replaces `@`.
    """
    return {_plain_metric(name).replace("@", at): value for name, value in metrics.items()}


def _plain_metric(name: str) -> str:
    parts = [_FORBIDDEN_IN_METRIC.sub("_", part).strip(" .") or "_" for part in name.split("/")]
    found = "/".join(parts)[:METRIC_MAX]
    return found if found == name else f"{found}_{hasher(name.encode(errors='replace')).hexdigest()[:6]}"


class TrackedRows:
    """Folds a log into the rows of the runs whose jobs name trackers, or of all runs. `state` precedes the events."""

    def __init__(self, state: Hive, every: bool = False) -> None:
        self.runs = Runs(state)
        self._every = every
        self._written: dict[str, dict[int, int]] = {}  # by run and evaluated version: the newest event in a row
        self._steps: dict[str, int] = {}  # by run: the step of its newest row
        self._skipped: set[str] = set()  # engines whose run is not asked for: their events are not folded

    def note(self, seq: int, event: ev.AnyEvent) -> tuple[RunSeries, list[Row]] | None:
        """Fold an event. Return the rows that it completes, and their run."""
        if event.engine in self._skipped and not isinstance(event, ev.EngineConfigured | ev.EngineStarted):
            return None
        self.runs.note(seq, event)
        series = self.runs.series.get(f"{event.engine}-{getattr(event, 'run', 0)}")
        if isinstance(event, ev.EngineStarted):
            self._skipped.discard(event.engine)
            if series is None or not (self._every or series.job.logging.trackers):
                self._skipped.add(event.engine)
        elif series is not None and isinstance(event, ev.StepCompleted | ev.EngineStopped | ev.EngineFailed):
            return series, self._rows(seq, event, series)
        return None

    def _rows(self, seq: int, event: ev.AnyEvent, series: RunSeries) -> list[Row]:
        waiting = self._evaluated(series)
        if isinstance(event, ev.StepCompleted):
            if not series.steps or series.steps[-1].done_seq != seq:
                return []
            first, found = event.step, [step_metrics(series.steps[-1])]
            found[0] |= next(waiting, {})
        else:
            first, found = self._steps.get(series.name, 0) + 1, [*waiting]
        rows = [Row(step=step, at_ns=event.at_ns, metrics=metrics) for step, metrics in enumerate(found, first)]
        if rows:
            self._steps[series.name] = rows[-1].step
        return rows

    def _evaluated(self, series: RunSeries) -> Iterator[dict[str, float]]:
        """Yield the figures of each version with episodes that are in no row yet, counting all of its episodes."""
        newest = {each.version: each.seq for each in series.evaluated}
        written = self._written.setdefault(series.name, {})
        for version in sorted(newest):
            if newest[version] > written.get(version, 0):
                written[version] = newest[version]
                figures = evaluation_metrics(each for each in series.evaluated if each.version == version)
                yield figures[version] | {VERSION: float(version)}


def sample_of(task: str, reward: float, record: CallRecord) -> ShownSample:
    """Return a call as a sample: the newest messages of its prompt, and its answer."""
    answer = record.choices[0].message if record.choices else None
    said = [_text(message) for message in record.messages] or [f"({record.prompt_tokens} tokens)"]
    reply = _text(answer) if answer else f"({record.completion_tokens()} tokens)"
    return ShownSample(
        task=task[:TEXT_MAX], reward=reward, prompt="\n\n".join(said)[:TEXT_MAX], answer=reply[:TEXT_MAX]
    )


def _text(message: Mapping[str, Any]) -> str:
    content, calls = message.get("content"), message.get("tool_calls")
    text = content if isinstance(content, str) else "" if content is None else msgspec.json.encode(content).decode()
    return f"{message.get('role', '')}: {text}" + (f"\n{msgspec.json.encode(calls).decode()}" if calls else "")


COLUMNS = ["task", "reward", "prompt", "answer"]


def table_of(samples: Iterable[ShownSample]) -> list[list[Any]]:
    """Return the rows of a table with these `COLUMNS`."""
    return [[each.task, each.reward, each.prompt, each.answer] for each in samples]


def text_of(sample: ShownSample) -> str:
    """Return a sample as text, for trackers that have no tables."""
    return f"task {sample.task}, reward {sample.reward:g}\n\n{sample.prompt}\n\n{sample.answer}"
