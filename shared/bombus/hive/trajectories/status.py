"""The status of rollout groups: how many wait for a batch, who pushed them, and which fit into no batch."""

import msgspec

from bombus.hive.trajectories.queue import Environment
from bombus.hive.trajectories.queue_status import stranded
from bombus.hive.trajectories.state import Trajectories

ENVIRONMENTS_SHOWN = 20


class EnvironmentStatus(msgspec.Struct, frozen=True, kw_only=True):
    environment: int
    name: str
    connected: bool
    group_size: int
    weight: float
    minimum: float | None
    sequences: int  # sequences that a batch can take
    held_groups: int  # groups that wait to be combined to group_size


class RolloutGroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's queue and its trainer. Each sentence in `stranded` says why some groups fit into no batch."""

    batch_size: int  # 0 while no trainer is registered
    step: int
    handed_out: int  # number of batches in this run
    delivered: bool  # whether the last batch was delivered; true if there was none
    groups: int
    sequences: int
    tokens: int
    environments: tuple[EnvironmentStatus, ...]
    stranded: tuple[str, ...]
    ours: bool = False  # whether our own trainer takes the batches
    num_steps: int = 0  # the trainer's last step
    given_up: int = 0  # number of groups dropped in this run, see `GroupsGivenUp`
    given_up_why: str = ""  # why the last of them was dropped


def rollout_group_status(state: Trajectories, ours: bool = False) -> RolloutGroupStatus | None:
    """Return the status of an engine's rollout groups, or None if it has no rollout groups, environments or trainer.

    `ours` says whether the engine's own trainer takes the batches.
    """
    queue = state.queue
    if state.trainer is None and not queue.groups and not queue.environments:
        return None
    return RolloutGroupStatus(
        batch_size=0 if state.trainer is None else queue.batch_size,
        step=state.current_step,
        handed_out=state.batches - state.withdrawn,
        delivered=state.batch is None or state.batch.delivered,
        groups=len(queue.groups),
        sequences=queue.sequences,
        tokens=queue.tokens,
        environments=tuple(map(_environment, queue.environments.values())),
        stranded=tuple(stranded(queue)),
        ours=ours,
        num_steps=0 if state.trainer is None else state.trainer.num_steps,
        given_up=state.given_up,
        given_up_why=state.given_up_why,
    )


def _environment(environment: Environment) -> EnvironmentStatus:
    return EnvironmentStatus(
        environment=environment.id,
        name=environment.name,
        connected=environment.connected,
        group_size=environment.group_size,
        weight=environment.weight,
        minimum=environment.minimum,
        sequences=environment.share.sequences,
        held_groups=environment.held_groups,
    )


def rollout_group_lines(status: RolloutGroupStatus) -> list[str]:
    """Return a status as lines of text. The caller must remove line breaks from names, which environments chose."""
    waits = "" if status.delivered else ", the last one not delivered yet"
    trainer = (
        f"step {status.step}, batches of {status.batch_size} sequences, {status.handed_out} handed out{waits}"
        if status.batch_size
        else "none has registered"
    )
    lines = [f"outside trainer: {trainer}"]
    if status.ours:
        lines = [f"trained here: step {status.step} of {status.num_steps}, batches of {status.batch_size} sequences"]
    lines.append(f"rollout groups: {status.groups} queued, {status.sequences} sequences, {status.tokens} tokens")
    for each in status.environments[:ENVIRONMENTS_SHOWN]:
        minimum = "" if each.minimum is None else f", minimum {each.minimum:g}"
        held = f", {each.held_groups} groups held" if each.held_groups else ""
        left = "" if each.connected else ", has left"
        lines.append(
            f"  environment {each.environment} {each.name}: {each.sequences} sequences, group_size {each.group_size}, "
            f"weight {each.weight:g}{minimum}{held}{left}"
        )
    if len(status.environments) > ENVIRONMENTS_SHOWN:
        lines.append(f"  and {len(status.environments) - ENVIRONMENTS_SHOWN} more environments")
    if status.given_up:
        what = "group was" if status.given_up == 1 else "groups were"
        lines.append(f"  {status.given_up} {what} given up, the last because {status.given_up_why}")
    return [*lines, *(f"  {why}" for why in status.stranded)]
