"""What trackers are given: a run, and one row of figures for each of its completed steps. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bombus.hive import events as ev
from bombus.hive.checkpoints import UNNAMED
from bombus.hive.records import CallRecord, CallRef, hasher
from bombus.hive.state import Hive
from bombus.insight.metrics import evaluation_metrics, step_metrics
from bombus.insight.runs import Runs
from bombus.replay.diagnosis.steps import RunSeries

NAME_MAX = 100  # characters of a project, a run or a folder
METRIC_MAX = 200  # characters of a figure's name
TEXT_MAX = 4_000  # characters of a setting or of a sampled text
SAMPLES = 4  # of a step
VERSION = "held_out/version"  # the policy version whose evaluation is in a row
_FORBIDDEN = re.compile(r"[^0-9A-Za-z_.+-]")
_FORBIDDEN_IN_METRIC = re.compile(r"[^\w.@ -]", re.ASCII)


class ShownSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled answer: the last turn of an episode in a batch."""

    task: str
    reward: float
    prompt: str
    answer: str

    @property
    def text(self) -> str:
        """The sample as text, for trackers that have no tables."""
        return f"task {self.task}, reward {self.reward:g}\n\n{self.prompt}\n\n{self.answer}"


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
    config: dict[str, Any]  # the job's settings, by names such as `trainer.lr`; a job has no secrets

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        return plain(f"{self.hive}-{self.engine}-{self.run}") + f"-{self.id}"

    @property
    def tags(self) -> dict[str, str]:
        return {"hive": self.hive, "engine": self.engine, "run": str(self.run), "digest": self.digest, "id": self.id}

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.config, **self.tags}


def tracked(hive: str, series: RunSeries, project: str = "", name: str = "", until: int = 0) -> TrackedRun:
    """Return a run as trackers see it. `project` and `name` replace those of the job.

    `until` is the last event of the log, if evaluations after the last step are written of a run that may go on. It is
    a run of its own, because the rows of such evaluations have the numbers of steps that may follow.
    """
    job = series.job
    given = job.experiment.experiment_name
    title = name or (series.name if given == UNNAMED else f"{given}-{series.name}")
    settings = job.settings().items()
    project = plain(project or job.experiment.project_name)
    title = plain(f"{title}-until-{until}" if until else title)
    identity = "\n".join((hive, series.name, str(series.started_ns), project, title))
    return TrackedRun(
        id=hasher(identity.encode()).hexdigest()[:12],
        hive=hive,
        engine=series.engine,
        run=series.run,
        project=project,
        name=title,
        digest=job.digest,
        config={plain(name): y[:TEXT_MAX] if isinstance(y, str) else y for name, y in settings},
    )


def plain(text: str) -> str:
    """Return a name that every tracker accepts, and that is the name of one file: no separators, no markup."""
    return _FORBIDDEN.sub("_", text)[:NAME_MAX].lstrip(".-") or "_"


def plain_metrics(metrics: Mapping[str, float], at: str = "@") -> dict[str, float]:
    """Return figures under names that every tracker accepts.

    A name that has to be changed ends in a digest, so that two names never become one. `at` replaces `@`.
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        replaced = name.replace("@", at)
        is_taken = replaced != name and replaced in metrics
        found[_plain_metric(name, is_taken).replace("@", at)] = value
    return found


def _plain_metric(name: str, is_taken: bool) -> str:
    parts = [_FORBIDDEN_IN_METRIC.sub("_", part).strip(" .") or "_" for part in name.split("/")]
    found = "/".join(parts)[:METRIC_MAX]
    if found == name and not is_taken:
        return found
    return f"{found}_{hasher(name.encode(errors='replace')).hexdigest()[:6]}"


class Noted(msgspec.Struct, frozen=True):
    """A row of a run, and the calls whose answers are shown with it; or, without a row, the run's end."""

    series: RunSeries
    row: Row | None = None
    sampled: Sequence[tuple[str, float, CallRef]] = ()


class TrackedRows:
    """Folds a log into the rows of the runs whose jobs name trackers, or of all runs. `state` precedes the events."""

    def __init__(self, state: Hive, every: bool = False) -> None:
        self.runs = Runs(state)
        self._every = every
        self._written: dict[str, dict[int, int]] = {}  # by run and evaluated version: the newest event in a row
        done = ((engine, engine.step_done) for engine in state.engines.values())
        self._steps = {f"{engine.name}-{engine.run}": step.step for engine, step in done if step}  # of newest rows
        self._skipped: set[str] = set()  # engines whose run is not asked for: their events are not folded

    def note(self, seq: int, event: ev.AnyEvent) -> list[Noted]:
        """Fold an event. Return what it completes."""
        if event.engine in self._skipped and not isinstance(event, ev.EngineConfigured | ev.EngineStarted):
            return []
        self.runs.note(seq, event)
        series = self.runs.series.get(f"{event.engine}-{getattr(event, 'run', 0)}")
        if isinstance(event, ev.EngineStarted):
            self._skipped.discard(event.engine)
            if series is None or not (self._every or series.job.logging.trackers):
                self._skipped.add(event.engine)
        elif series is not None and isinstance(event, ev.StepCompleted | ev.EngineStopped | ev.EngineFailed):
            return [*self._complete(seq, event, series)]
        return []

    def _complete(self, seq: int, event: ev.AnyEvent, series: RunSeries) -> Iterator[Noted]:
        if not isinstance(event, ev.StepCompleted):
            yield from self.evaluations(series, event.at_ns)
            yield Noted(series)
        elif series.steps and series.steps[-1].done_seq == seq:
            newest, every = series.steps[-1], series.job.logging.samples_every
            metrics = step_metrics(newest) | next(self._evaluated(series), {})
            sampled = newest.sampled[:SAMPLES] if every and event.step % every == 0 else ()
            self._steps[series.name] = event.step
            yield Noted(series, Row(step=event.step, at_ns=event.at_ns, metrics=metrics), sampled)

    def evaluations(self, series: RunSeries, at_ns: int) -> Iterator[Noted]:
        """Yield the evaluations that are in no row yet, one in each row: those after the last step of a run."""
        for metrics in self._evaluated(series):
            step = self._steps[series.name] = self._steps.get(series.name, 0) + 1
            yield Noted(series, Row(step=step, at_ns=at_ns, metrics=metrics))

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
