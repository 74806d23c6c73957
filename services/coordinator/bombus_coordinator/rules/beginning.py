"""What a new run starts from: the model as loaded, or a checkpoint left by an earlier run of the same job."""

from typing import Any, NamedTuple

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.checkpoints import UNNAMED
from bombus.hive.events import Beginning, StepCompleted
from bombus.hive.state import EngineState

NEVER, AUTO, FROM = "never", "auto", "from "
PROJECT, EXPERIMENT = "experiment.project_name", "experiment.experiment_name"
# Settings that a checkpoint depends on. Jobs that differ in any of them are different jobs.
SAME_JOB = (
    "model.path",
    "model.tokenizer",
    "model.seed",
    "trainer.backend",
    "trainer.lora_rank",
    "trainer.lora_alpha",
    "trainer.target_modules",
)
TRAINS_NOTHING = ("trainer.resume", "trainer.checkpoint_every", "trainer.checkpoints_kept")
CHANGES_MAX = 20
CHANGE_CHARS_MAX = 200


class _Left(NamedTuple):
    """A checkpoint left by an earlier run, and how that run's job differs from the one that is starting."""

    done: StepCompleted
    other: dict[str, str]

    @property
    def is_of_the_experiment(self) -> bool:
        return not {PROJECT, EXPERIMENT} & self.other.keys()

    @property
    def obstacles(self) -> list[str]:
        """The settings that keep the job from continuing at this checkpoint."""
        return [change for name, change in self.other.items() if name in (PROJECT, EXPERIMENT, *SAME_JOB)]

    def begins(self) -> Beginning:
        shown = [name for name in self.other if name.startswith(("trainer.", "model.")) and name not in TRAINS_NOTHING]
        changed = [self.other[name] for name in shown]
        return Beginning(
            run=self.done.run,
            step=self.done.step,
            checkpoint=self.done.checkpoint,
            checkpoint_digest=self.done.checkpoint_digest,
            changed=tuple(changed[:CHANGES_MAX]),
        )

    def __str__(self) -> str:
        return f"version {self.done.step} of run {self.done.run}"


def beginning(engine: EngineState) -> tuple[Beginning | None, str]:
    """Return the checkpoint from which the next run begins, or None and the reason for beginning with the model as
    loaded.

    The reason is "" unless the experiment has checkpoints that this job cannot use. Raises `Refused` if the job must
    continue from a checkpoint and cannot.
    """
    assert engine.configured is not None
    resume, wanted = engine.configured.collection.resume, engine.configured.config
    if resume == NEVER:
        return None, ""
    left = [
        _Left(done, _differences(run.config, wanted))
        for run in reversed(engine.checkpoints_left())
        for done in reversed(run.checkpoints)
    ]
    if resume == AUTO:
        return _newest(left, wanted)
    return _named(left, int(resume.removeprefix(FROM))).begins(), ""


def _newest(left: list[_Left], wanted: str) -> tuple[Beginning | None, str]:
    """Return the job's newest checkpoint, or None and the reason why the run starts over.

    A named experiment contains only one job, so this raises `Refused` if the experiment's checkpoints belong to a
    different job. Unnamed jobs may be unrelated.
    """
    ours = [each for each in left if each.is_of_the_experiment]
    same = next((each for each in ours if not each.obstacles), None)
    if same is not None:
        return same.begins(), ""
    if not ours:
        return None, ""
    why = f"the checkpoint of {ours[0]} belongs to another job ({', '.join(ours[0].obstacles)})"
    if _fields(wanted).get(EXPERIMENT, UNNAMED) == UNNAMED:
        return None, why
    raise Refused(
        Code.BAD_CONFIG,
        f"This experiment has already begun, but {why}. Set trainer.resume to never to start over, or use another "
        "experiment.experiment_name; to continue, restore these settings.",
    )


def _named(left: list[_Left], step: int) -> _Left:
    """Return the newest checkpoint of a step. Raises `Refused` if there is none, or if all belong to other jobs."""
    of_step = [each for each in left if each.done.step == step]
    if not of_step:
        known = ", ".join(f"{each.done.step} (run {each.done.run})" for each in reversed(left)) or "none"
        raise Refused(
            Code.BAD_CONFIG,
            f"trainer.resume is 'from {step}', but no checkpoint of version {step} is left; available: {known}",
        )
    same = next((each for each in of_step if not each.obstacles), None)
    if same is None:
        raise Refused(
            Code.BAD_CONFIG,
            f"trainer.resume is 'from {step}', but the checkpoint of {of_step[0]} belongs to another job: "
            f"{', '.join(of_step[0].obstacles)}. Set trainer.resume to never, or restore these settings.",
        )
    return same


def _differences(before: str, wanted: str) -> dict[str, str]:
    """Return the settings that differ between two jobs, ignoring those that a job from an older version lacks."""
    old, new = _fields(before), _fields(wanted)
    return {
        name: f"{name} {value!r} -> {new[name]!r}"[:CHANGE_CHARS_MAX]
        for name, value in old.items()
        if name in new and value != new[name]
    }


def _fields(job: str) -> dict[str, Any]:
    groups = msgspec.json.decode(job, type=dict[str, dict[str, Any]])
    return {f"{group}.{field}": value for group, fields in groups.items() for field, value in fields.items()}
