"""Retrains logged batches, without inference, from a kept checkpoint or from the model as loaded."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from bombus.datums.reading import CallReader
from bombus.errors import EngineFault, LogCorrupted
from bombus.hive.events import BatchReady, StepCompleted, Weights
from bombus.replay.logged_run import LoggedRun
from bombus.replay.source import Source
from bombus.weights.checkpoints import read_checkpoint
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.data.batch import EpisodeGroup
from bombus_trainer.data.reading import ReadBatch, read_batch
from bombus_trainer.loading import load_executor
from bombus_trainer.publish.export import ModelPart, digest_like, digest_of
from bombus_trainer.publish.step_checkpoint import StepFacts, load_step
from bombus_trainer.settings import TrainerSettings

Report = Callable[[str], None]


class Trained(msgspec.Struct, frozen=True):
    """A retrained step. `logged` are its metrics on the log; `sha256` is the digest of the weights after retraining."""

    step: int
    metrics: dict[str, float]
    logged: dict[str, float]
    sha256: str
    logged_sha256: str

    @property
    def agrees(self) -> bool:
        return self.sha256 == self.logged_sha256


async def read_again(
    calls: CallReader,
    batch: BatchReady,
    recorded: Mapping[str, float],
    max_staleness: int | None,
    *,
    auxiliary_calls: bool,
) -> list[EpisodeGroup]:
    """Read the batch of a completed step. `recorded` are the step's metrics on the log.

    Raises `LogCorrupted` if calls that the step used are gone from the log, or `EngineFault` if the batch is made up of
    rollout groups.
    """
    if batch.taken:
        raise EngineFault(
            f"step {batch.step} was trained on rollout groups, which a replay cannot read: only the run's own trainer "
            "can retrain such steps"
        )
    return read_whole(await read_batch(calls, batch, max_staleness, auxiliary_calls=auxiliary_calls), batch, recorded)


def read_whole(read: ReadBatch, batch: BatchReady, recorded: Mapping[str, float]) -> list[EpisodeGroup]:
    """Return the groups of a batch as `read` for retraining. `recorded` are the step's metrics on the log.

    Raises `LogCorrupted` if more of the batch is missing now than when the step was made.
    """
    if len(read.lost) > int(recorded.get("episodes_left_out", 0)):
        why = next(iter(read.lost.values()))
        raise LogCorrupted(f"step {batch.step} cannot be retrained: some of its calls are no longer in the log ({why})")
    return list(read.groups)


class Retraining:
    """Repeats the steps of a logged run with an executor."""

    def __init__(self, source: Source, logged: LoggedRun, executor: Executor) -> None:
        self.step = 0  # the newest step that the weights include
        self.executor = executor
        self._source = source
        self._logged = logged

    @classmethod
    async def at(cls, source: Source, logged: LoggedRun, step: int, executor: Executor, report: Report) -> "Retraining":
        """Start from the newest usable checkpoint at or before `step`. `executor` has the run's job, and is at step 0.

        If there is no such checkpoint, start from the model as loaded. `report` is called with a line that says where
        retraining starts. Raises `EngineFault` if the run began at a checkpoint and none is left.
        """
        made = cls(source, logged, executor)
        saved = await asyncio.to_thread(_newest_kept, logged, step, report)
        if saved is not None:
            made.step, tensors = saved
            executor.load_tensors(tensors)
            report(f"starting from the checkpoint of step {made.step}")
            return made
        if logged.first:
            raise EngineFault(
                f"run {logged.run} began {logged.begun}, but no checkpoint of it up to step {step} is left"
            )
        report("starting from the model as loaded" + (f": no checkpoint up to step {step} is kept" if step else ""))
        version = logged.weights.get(0)
        if version is not None and not await asyncio.to_thread(_begins_as, executor, version):
            report("the model as loaded here differs from version 0 of the run, so no later version can match")
        return made

    async def make(self, step: int) -> Trained:
        """Make the next step. Raises `LogCorrupted` if calls that the run was trained on are gone from the log."""
        assert step == self.step + 1
        logged = self._logged.step(step)
        recorded = logged.done.metrics if logged.done is not None else {}
        executor, bound = self.executor, self._logged.job.to_collection().trained_staleness
        auxiliary_calls = self._logged.job.rollout.trains_auxiliary_calls
        groups = await read_again(self._source, logged.batch, recorded, bound, auxiliary_calls=auxiliary_calls)
        metrics = await asyncio.to_thread(executor.train_step, groups, step)
        weights = self._logged.weights.get(step)
        seal = await asyncio.to_thread(digest_like, executor, weights)
        self.step = step
        return Trained(step, metrics, recorded, seal, weights.sha256 if weights is not None else "")

    async def branch(self, settings: TrainerSettings, allow_download: bool) -> None:
        """Continue with other settings. Raises `EngineFault` if the current state does not fit the model of these
        settings."""
        tensors = self.executor.tensors()  # includes the random generator's state, which loading a model resets
        self.executor = await asyncio.to_thread(load_executor, settings, allow_download)
        if self.step:
            self.executor.load_tensors(tensors)


def logged_settings(logged: LoggedRun, step: int, device: str) -> TrainerSettings:
    """Return the settings that the run's trainer had at a step: the job's, with the size of the micro-batches used
    then."""
    done = logged.step(step).done
    bins = int(done.metrics.get("bin_tokens", 0)) if done is not None else 0
    return TrainerSettings.of_job(logged.job, device, bins)


def _begins_as(executor: Executor, version: Weights) -> bool:
    base = version.adapter_of
    on_same = base is None or digest_of(executor, part=ModelPart.BASE) == base.sha256
    return on_same and digest_like(executor, version) == version.sha256


def _newest_kept(logged: LoggedRun, step: int, report: Report) -> tuple[int, dict[str, Tensor]] | None:
    for number in sorted((each for each in logged.checkpoints if each <= step), reverse=True):
        done: StepCompleted = logged.checkpoints[number]
        if not done.checkpoint or not Path(done.checkpoint).is_dir():
            continue  # not every step has a checkpoint, and only the newest two are kept
        try:
            return number, load_step(Path(done.checkpoint), done.checkpoint_digest)
        except EngineFault as error:
            report(f"{error}: it is skipped")
    return None


def logged_machine(done: StepCompleted) -> str:
    """Return the machine that the trainer ran on, from the step's checkpoint; "" if there is no checkpoint."""
    try:
        return read_checkpoint(Path(done.checkpoint), StepFacts, done.checkpoint_digest).facts.machine
    except EngineFault:
        return ""
