"""The steps that a trainer may have to repeat: those after the older of its two newest checkpoints (R11)."""

from collections.abc import Iterable, Iterator

import msgspec

from bombus.hive.events import BatchReady, StepCompleted

IDLE_S, IDLE_S_MAX = 240.0, 3600.0  # bounds of the idle limit of an episode whose client gives none
IDLE_STEPS = 2.0  # that limit as a multiple of the longest step
STEPS_APART = 100  # the most steps between two checkpoints: batches after the older one are kept, with their calls
STEPS_KEPT = 2 * STEPS_APART + 2  # includes the outstanding batch


class SealedStep(msgspec.Struct, kw_only=True):
    """A step and its batch. `done` is None while the step is outstanding.

    Once the step is `released`, the calls of its episodes may be purged, because no run that continues from an earlier
    step will need them.
    """

    batch: BatchReady
    done: StepCompleted | None = None
    released: bool = False

    @property
    def saved(self) -> bool:
        """Return whether there is a checkpoint of the step."""
        return self.done is not None and bool(self.done.checkpoint)


def complete(steps: list[SealedStep], done: StepCompleted) -> None:
    """Record the outcome of a step, and drop the steps before the one that saved the older of the two newest
    checkpoints."""
    for step in steps:
        if step.batch.step == done.step:
            step.done = done
    saved = [number for number, step in enumerate(steps) if step.saved]
    del steps[: max(len(steps) - STEPS_KEPT, saved[-2] if len(saved) > 1 else 0)]


def episodes_of(steps: Iterable[SealedStep]) -> Iterator[str]:
    """Yield the episodes in the batches of these steps."""
    return (each.episode for step in steps for group in step.batch.groups for each in group.episodes)


def up_to(steps: list[SealedStep], checkpoint: str) -> list[SealedStep]:
    """Return the steps up to the one that saved this checkpoint, so that a new run that starts from the checkpoint can
    repeat them.

    Returns no steps if there is no older checkpoint among them, or if any of them was never completed.
    """
    at = next((number for number, step in enumerate(steps) if step.saved and _left(step, checkpoint)), -1)
    found = steps[: at + 1]
    return found if len(checkpoints(found)) > 1 and all(step.done is not None for step in found) else []


def _left(step: SealedStep, checkpoint: str) -> bool:
    return step.done is not None and step.done.checkpoint == checkpoint


def lacking(steps: list[SealedStep]) -> int:
    """Return how many of the newest steps come after the older of the two checkpoints or, until there are two, after
    the model as loaded."""
    return len(steps) - (sum(step.saved for step in steps) > 1)


def checkpoints(steps: list[SealedStep]) -> list[StepCompleted]:
    """Return the steps that saved the newest checkpoints, newest first. There are at most two."""
    return [step.done for step in reversed(steps) if step.done is not None and step.saved]


def is_due(steps: list[SealedStep], step: int, every: int) -> bool:
    """Return whether `step` saves a checkpoint: every `every`-th step does, and so does a step that comes `STEPS_APART`
    after the newest checkpoint.
    """
    newest = next((done.step for done in checkpoints(steps)), 0)
    return step % every == 0 or step - newest >= STEPS_APART


def steps_after(steps: list[SealedStep], checkpoint: int, newest: int) -> list[SealedStep] | None:
    """Return the completed steps after step `checkpoint`, up to `newest`, or None if not all of them are kept."""
    found = [step for step in steps if step.done is not None and checkpoint < step.batch.step <= newest]
    return found if len(found) == newest - checkpoint else None


def idle_limit_s(steps: list[SealedStep]) -> float:
    """Return the idle limit, in seconds, for an episode whose client does not set one.

    The limit is twice the longest of the kept steps, because an agent may be waiting for a service that a step blocks,
    such as a judge that shares the trainer's GPUs. Before the first step, or if steps are short, the swarm contract's
    limit applies.
    """
    seconds = [(step.done.at_ns - step.batch.at_ns) / 1e9 for step in steps if step.done is not None]
    return min(max(IDLE_S, IDLE_STEPS * max(seconds, default=0.0)), IDLE_S_MAX)
