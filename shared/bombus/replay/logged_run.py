"""A run as recorded on its log: the job, the batch of each step and its outcome, and the policy versions."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from bombus.config.job import RunConfig
from bombus.hive import events as ev
from bombus.hive.checkpoints import step_of, where_begun
from bombus.hive.fold.evolve import as_folded, evolve
from bombus.hive.state import Hive
from bombus.replay.source import NotOnLog, Source


class LoggedStep(msgspec.Struct):
    """A step. `seq` is the event that sealed its batch. `done` is None until the step has been completed."""

    batch: ev.BatchReady
    seq: int
    done: ev.StepCompleted | None = None


class LoggedRun(msgspec.Struct, kw_only=True):
    """A run as its log records it.

    `checkpoints` includes the checkpoint at which the run began and, on a compacted log, the last one before the first
    remaining batch. `begun` is a clause that says where the run began, or "" if it did not begin at a checkpoint, and
    `first` is the step at which it began. `started_ns` is 0 for a run that started before a compacted log's first
    event. A run that `serves` training operations has no batches, and no versions after the first.
    """

    engine: str
    run: int
    job: RunConfig
    job_digest: str
    started_ns: int = 0
    begun: str = ""
    first: int = 0
    serves: bool = False
    steps: dict[int, LoggedStep] = {}
    checkpoints: dict[int, ev.StepCompleted] = {}
    versions: dict[int, ev.WeightsReady] = {}

    def step(self, number: int) -> LoggedStep:
        """Return the step with this number. Raises `NotOnLog` if there is none."""
        found = self.steps.get(number)
        if self.serves:
            raise NotOnLog(
                f"run {self.run} of engine {self.engine} served training operations and made no batches: `bombus "
                "replay timeline --model ID` shows what was done with a model"
            )
        if found is None:
            have = f"it has {min(self.steps)} to {max(self.steps)}" if self.steps else "no batch was sealed in it"
            raise NotOnLog(f"run {self.run} of engine {self.engine} has no batch for step {number} in this log; {have}")
        return found

    @property
    def weights(self) -> dict[int, ev.Weights]:
        """Return the stored policy versions, by number."""
        return {version: ready.weights for version, ready in self.versions.items()}

    @property
    def tokenizer(self) -> str:
        """Return the name of the object with the tokenizer, or "" if no weights were published."""
        return next((ready.weights.tokenizer for ready in self.versions.values()), "")


async def read_run(source: Source, engine: str | None = None, run: int | None = None) -> LoggedRun:
    """Read a run of an engine: by default, the newest run of the only engine. Raises `NotOnLog` or `LogCorrupted`."""
    hive, position = await source.base()
    runs = {(found.engine, found.run): found for found in _of_state(hive, position)}
    configured = {name: state.configured for name, state in hive.engines.items()}
    current = {found.engine: found for found in runs.values()}
    elsewhere = {name for name, state in hive.engines.items() if state.trajectories.trainer and not state.makes_steps}
    async for entry in source.events(position):
        event = entry.event
        evolve(hive, event)
        if isinstance(event, ev.EngineConfigured):
            configured[event.engine] = event
        elif isinstance(event, ev.EngineStarted) and is_trained_elsewhere(event):
            elsewhere.add(event.engine)
            current.pop(event.engine, None)
        elif isinstance(event, ev.EngineStarted) and (config := configured.get(event.engine)) is not None:
            logged = _started(config, event.run)
            logged.started_ns, logged.begun = event.at_ns, where_begun(event)
            logged.serves = event.base != ""
            if event.begins is not None:
                logged.first = event.begins.step
                _note(logged, entry.seq, step_of(event.engine, event.begins))
            current[event.engine] = runs[event.engine, event.run] = logged
        elif event.engine in current:
            _note(current[event.engine], entry.seq, as_folded(hive, event))
    return _choose(source, runs, elsewhere, engine, run)


def _of_state(hive: Hive, position: int) -> list[LoggedRun]:
    """Return the runs that were in progress in the state before a compacted log's first event."""
    found = []
    for engine in hive.engines.values():
        if engine.active is None:
            continue
        logged = _started(engine.active, engine.run)
        logged.begun = "" if engine.started is None else where_begun(engine.started)
        logged.serves = engine.clients_take_episodes
        logged.first = engine.begun
        for step in engine.steps:
            if step.batch.run == engine.run:  # an earlier run's step may belong to the checkpoint where this run began
                _note(logged, position, step.batch)
            if step.done is not None:
                _note(logged, position, step.done)
        for event in (engine.weights_before, engine.weights, engine.step_done, engine.batch):
            if event is not None:
                _note(logged, position, event)
        found.append(logged)
    return found


def _started(config: ev.EngineConfigured, run: int) -> LoggedRun:
    job = RunConfig.from_json(config.config)
    return LoggedRun(engine=config.engine, run=run, job=job, job_digest=config.config_digest)


def _note(logged: LoggedRun, seq: int, event: ev.AnyEvent) -> None:
    match event:
        case ev.BatchReady():
            logged.steps[event.step] = LoggedStep(event, seq)
        case ev.StepCompleted():
            logged.checkpoints[event.step] = event
            if event.step in logged.steps:
                logged.steps[event.step].done = event
        case ev.WeightsReady():
            logged.versions[event.version] = event


def is_trained_elsewhere(event: ev.EngineStarted) -> bool:
    """Return whether a run collects rollout groups for an external trainer, in which case it has no job and no
    versions."""
    return not event.base and not event.config_digest


def _choose(
    source: Source,
    runs: Mapping[tuple[str, int], LoggedRun],
    elsewhere: Collection[str],
    engine: str | None,
    run: int | None,
) -> LoggedRun:
    engines = sorted({name for name, _ in runs})
    if elsewhere and (not engines or engine in elsewhere) and engine not in engines:
        names = ", ".join(sorted(elsewhere))
        raise NotOnLog(
            f"in {source.title} engine {names} collected rollout groups for an external trainer, which has the weights "
            "and the job: `bombus replay timeline` shows the batches that the trainer got"
        )
    if not engines:
        raise NotOnLog(f"no engine was started in {source.title}")
    if engine is None and len(engines) > 1:
        raise NotOnLog(f"{source.title} has several engines: choose one of {', '.join(engines)} with --engine")
    name = engines[0] if engine is None else engine
    numbers = [number for each, number in runs if each == name]
    if not numbers:
        raise NotOnLog(f"{source.title} has no engine {name}, only {', '.join(engines)}")
    number = max(numbers) if run is None else run
    if number not in numbers:
        raise NotOnLog(f"{source.title} has no run {number} of engine {name}, only {', '.join(map(str, numbers))}")
    return runs[name, number]


async def client_metadata(source: Source, step: LoggedStep) -> dict[str, dict[str, Any]]:
    """Return the `metadata` that clients gave when they ended a batch's episodes, keyed by episode."""
    wanted = {episode.episode for group in step.batch.groups for episode in group.episodes}
    found: dict[str, dict[str, Any]] = {}
    async for entry in source.events(0, step.seq):
        event = entry.event
        if isinstance(event, ev.EpisodeEnded) and event.run == step.batch.run:
            outcomes = [outcome for outcome in event.outcomes if outcome.episode in wanted]
            found |= {outcome.episode: outcome.metadata for outcome in outcomes}
    return found
