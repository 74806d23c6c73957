"""What each event about rollout groups changes in the state of an engine."""

from collections.abc import Container, Iterable
from itertools import islice

import msgspec

from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.trajectories import queue as queues
from bombus.hive.trajectories.queue import Environment, EnvironmentShare, QueuedGroup
from bombus.hive.trajectories.state import REPEAT_S, HandedOut, RecentPush, Trajectories, digest_of

ANSWERS_KEPT = 65_536  # answers to pushes of the last minute, one per group
PUSHES_BETWEEN = 1_024  # number of pushes between two times at which outdated ones are dropped


def register(state: Trajectories, event: ev.TrainerRegistered) -> None:
    """Begin a run. Groups that were pushed while there was no run wait for it."""
    queues.register(state.queue, event.batch_size)
    state.trainer = event


def end_run(state: Trajectories) -> None:
    """End a run: drop its groups (R8), and the keys by which repeated pushes are recognised.

    Environments stay, since they do not notice when a run ends. This includes environments that have fallen silent,
    because they may return.
    """
    queue = state.queue
    kept = [each for each in queue.environments.values() if each.connected or each.id in state.silent_ns]
    joined, named = queue.joined, queue.named.copy()
    queues.reset(queue)
    for environment in kept:
        queues.join(queue, _empty(environment))
    queue.joined, queue.named = joined, named
    state.trainer = state.batch = None
    state.begun = False
    _forget_run(state)
    state.pushes.clear()


def _forget_run(state: Trajectories) -> None:
    state.batches = state.withdrawn = state.before = state.given_up = state.grouped = state.grouped_sequences = 0
    state.given_up_why = ""
    state.queued_at.clear()


def _empty(environment: Environment) -> Environment:
    return msgspec.structs.replace(environment, share=EnvironmentShare(), held={}, held_groups=0, held_sequences=0)


def begin(state: Trajectories, _: ev.BatchesBegun) -> None:
    state.begun = True


def join(state: Trajectories, event: ev.EnvironmentJoined) -> None:
    environment = Environment(
        id=event.environment,
        name=event.name,
        max_tokens=event.max_tokens,
        weight=event.weight,
        group_size=event.group_size,
        minimum=event.minimum,
        owner=event.owner,
        admin=event.admin,
    )
    queues.join(state.queue, environment, event.desired_name)
    state.heard_ns[event.environment] = event.at_ns
    state.silent_ns.pop(event.environment, None)


def leave(state: Trajectories, event: ev.EnvironmentLeft) -> None:
    queues.leave(state.queue, event.environment)
    state.heard_ns.pop(event.environment, None)
    if event.reason == ev.EnvironmentEnd.SILENT:
        state.silent_ns[event.environment] = event.at_ns
        trim(state.silent_ns, queues.ENVIRONMENTS_MAX)


def push(state: Trajectories, event: ev.GroupsPushed) -> None:
    if event.key:
        held = tuple(queues.held_after(state.queue, event.groups))
        state.pushes.pop(event.key, None)
        state.pushes[event.key] = RecentPush(event.at_ns, held, digest_of(event.groups))
        _forget_pushes(state, event.at_ns)
    if event.version >= 0:
        numbers = range(state.queue.arrived + 1, state.queue.arrived + 1 + len(event.groups))
        state.queued_at |= dict.fromkeys(numbers, event.version)
        state.grouped += len(event.episodes)
        state.grouped_sequences += sum(group.sequences for group in event.groups)
    queues.push(state.queue, event.groups)
    if event.groups:
        state.latest = event.groups[-1]
    for environment in {group.environment for group in event.groups}:
        if environment is not None and environment in state.heard_ns:
            state.heard_ns[environment] = event.at_ns


def _forget_pushes(state: Trajectories, now_ns: int) -> None:
    """Forget pushes that are too old to be repeated, and the oldest pushes if there are too many. Does so only once
    every `PUSHES_BETWEEN` pushes."""
    if len(state.pushes) % PUSHES_BETWEEN:
        return
    kept, answers = 0, 0
    for push in reversed(state.pushes.values()):
        answers += len(push.held)
        if answers > ANSWERS_KEPT or now_ns - push.at_ns > REPEAT_S * 1e9:
            break
        kept += 1
    for key in list(islice(state.pushes, len(state.pushes) - kept)):
        del state.pushes[key]


def hand_out(state: Trajectories, event: ev.BatchHandedOut) -> None:
    queue = state.queue
    queued = [number for number in event.groups if queues.is_queued(queue, number)]
    combined = {number: queue.combined[number] for number in queued if number in queue.combined}
    numbers = tuple(sorted({*queued, *(each for members in combined.values() for each in members)}))
    groups = _taken(state, numbers)
    state.batches = event.number
    if state.batch is not None and state.batch.delivered:
        state.before = state.batch.number
    state.batch = HandedOut(
        run=event.run,
        number=event.number,
        groups=groups,
        handed_ns=event.at_ns,
        numbers=numbers,
        combined=combined,
    )


def _taken(state: Trajectories, numbers: tuple[int, ...]) -> list[QueuedGroup]:
    _wait_no_more(state, numbers)
    return queues.take(state.queue, numbers)


def _wait_no_more(state: Trajectories, numbers: Iterable[int]) -> None:
    for number in numbers:
        state.queued_at.pop(number, None)


def give_up(state: Trajectories, event: ev.GroupsGivenUp) -> None:
    """Forget groups. If they were in a batch, the batch's other groups are requeued, and the batch does not count as a
    step."""
    state.given_up += len(event.groups)
    state.given_up_why = event.why
    _wait_no_more(state, event.groups)
    batch = state.batch
    if batch is not None and not batch.delivered and (batch.run, batch.number) == (event.run, event.number):
        taken = dict(zip(batch.numbers, batch.groups, strict=False))
        queues.put_back(state.queue, taken, batch.combined, event.groups)
        state.batch = None
        state.withdrawn += 1
    elif not event.number:
        queues.give_up(state.queue, event.groups)


def without_bodies(batch: ev.BatchReady, lost: Container[int]) -> ev.BatchReady:
    """Return a batch of our own trainer without the bodies of its lost groups, so that the trainer does not train on
    them."""
    kept = tuple(
        msgspec.structs.replace(group, body=None) if number in lost else group
        for number, group in zip(batch.taken, batch.rollout_groups, strict=False)
    )
    return msgspec.structs.replace(batch, rollout_groups=kept)


def move(state: Trajectories, event: ev.BodiesMoved) -> None:
    """Record the new places of the bodies of groups that are queued or in the batch that was handed out last."""
    batch = state.batch
    of_batch = {} if batch is None else {number: place for place, number in enumerate(batch.numbers)}
    for moved in event.moved:
        place = of_batch.get(moved.group)
        if moved.group in state.queue.groups:
            group = state.queue.groups[moved.group]
            state.queue.groups[moved.group] = msgspec.structs.replace(group, body=moved.body)
        elif batch is not None and place is not None:
            group = batch.groups[place]
            batch.groups[place] = msgspec.structs.replace(group, body=moved.body)
        else:
            continue
        if state.latest is not None and state.latest.body == group.body:
            state.latest = msgspec.structs.replace(state.latest, body=moved.body)


def seal(state: Trajectories, numbers: tuple[int, ...]) -> tuple[QueuedGroup, ...]:
    """Remove the groups of our own trainer's next batch from the queue, and return them."""
    state.batches += 1
    return tuple(_taken(state, numbers))


def deliver(state: Trajectories, event: ev.BatchDelivered) -> None:
    if state.batch is not None and (state.batch.run, state.batch.number) == (event.run, event.number):
        state.batch.delivered = True


def reset(state: Trajectories, _: ev.GroupsReset) -> None:
    """Forget all groups and environments."""
    queues.reset(state.queue)
    state.batch = state.latest = None
    _forget_run(state)
    for kept in (state.pushes, state.heard_ns, state.silent_ns):
        kept.clear()
