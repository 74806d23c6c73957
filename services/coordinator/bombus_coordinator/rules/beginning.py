"""Where a new run begins: at the model as loaded, or at a checkpoint that an earlier run of the same job has left."""

from typing import Any

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.events import Beginning
from bombus.hive.state import EngineState, LeftCheckpoint

NEVER, AUTO, FROM = "never", "auto", "from "
# Settings that a checkpoint depends on. A job in which one of them differs is another job.
SAME_JOB = (
    "experiment.project_name",
    "experiment.experiment_name",
    "model.path",
    "model.seed",
    "trainer.backend",
    "trainer.lora_rank",
    "trainer.lora_alpha",
    "trainer.target_modules",
)
CHANGES_MAX = 20


def beginning(engine: EngineState) -> Beginning | None:
    """Return the checkpoint at which the next run begins, None for the model as loaded.

    Raises `Refused` when the job names a version from which it cannot go on.
    """
    assert engine.configured is not None
    resume = engine.configured.collection.resume
    if resume == NEVER:
        return None
    wanted = engine.configured.config
    left = engine.checkpoints_left()
    if resume == AUTO:
        found = next((each for each in reversed(left) if not _other_job(each.config, wanted)), None)
    else:
        found = _named(left, int(resume.removeprefix(FROM)), wanted)
    if found is None:
        return None
    return Beginning(
        run=found.done.run,
        step=found.done.step,
        checkpoint=found.done.checkpoint,
        checkpoint_digest=found.done.checkpoint_digest,
        changed=_changes(found.config, wanted),
    )


def _named(left: list[LeftCheckpoint], step: int, wanted: str) -> LeftCheckpoint:
    """Return the newest checkpoint of a step. Raises `Refused` when there is none, or only those of other jobs."""
    of_step = [each for each in reversed(left) if each.done.step == step]
    if not of_step:
        known = ", ".join(f"{each.done.step} (run {each.done.run})" for each in left) or "none"
        raise Refused(
            Code.BAD_CONFIG,
            f"trainer.resume is 'from {step}', and no checkpoint of version {step} is left; there are: {known}",
        )
    same = next((each for each in of_step if not _other_job(each.config, wanted)), None)
    if same is None:
        newest = of_step[0]
        raise Refused(
            Code.BAD_CONFIG,
            f"trainer.resume is 'from {step}', and the checkpoint of run {newest.done.run} is another job's: "
            f"{', '.join(_other_job(newest.config, wanted))}. Set trainer.resume to never, or these settings to what "
            "they were.",
        )
    return same


def _other_job(before: str, wanted: str) -> list[str]:
    return [f"{name} {old!r} -> {new!r}" for name, old, new in _differences(before, wanted) if name in SAME_JOB]


def _changes(before: str, wanted: str) -> tuple[str, ...]:
    """Return the settings of the trainer that differ from those with which the checkpoint was made."""
    found = [f"{name} {old!r} -> {new!r}" for name, old, new in _differences(before, wanted)]
    return tuple(change for change in found if change.startswith("trainer."))[:CHANGES_MAX]


def _differences(before: str, wanted: str) -> list[tuple[str, Any, Any]]:
    """Return the settings that differ between two jobs. A job of an older version may lack some: they do not count."""
    old, new = (msgspec.json.decode(job, type=dict[str, dict[str, Any]]) for job in (before, wanted))
    return [
        (f"{group}.{field}", value, new[group][field])
        for group, fields in old.items()
        for field, value in fields.items()
        if field in new.get(group, {}) and value != new[group][field]
    ]
