"""Queue rollout groups, and hand them out as batches (R16)."""

from collections.abc import Iterable, Sequence

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.bounded import portions
from bombus.hive.events import DropReason, Event
from bombus.hive.inbox import (
    BatchSent,
    BatchTaken,
    BodiesStored,
    Done,
    EpisodesGrouped,
    GiveUpGroups,
    Pushed,
    PushGroups,
    TakeBatch,
    TrajectoriesStored,
)
from bombus.hive.loading import all_loaded
from bombus.hive.state import EngineState, Hive
from bombus.hive.trajectories.forming import form
from bombus.hive.trajectories.queue import QueuedGroup, held_after, why_no_room, why_not_queued
from bombus.hive.trajectories.state import digest_of
from bombus_coordinator.rules.decision import CommandReply, Decision, Decisions, wrong_phase
from bombus_coordinator.rules.live import Live
from bombus_coordinator.rules.operations.queue import is_body
from bombus_coordinator.rules.operations.serving import FLOORS_MAX
from bombus_coordinator.rules.trajectories.registering import again, check_queue

GROUPS_MAX = 1_024  # maximum number in one push, whose event is then far below the size limit for messages
KEY_CHARS_MAX = 200
WHY_CHARS_MAX = 500  # maximum length of the reason for giving groups up


def push(hive: Hive, live: Live, message: PushGroups) -> Decisions:
    """Queue groups, all or none. Groups that arrive before a trainer wait for it."""
    engine = hive.engine(message.engine)
    state = engine.trajectories
    repeated = state.repeated(message.key, live.now_ns)
    if repeated is not None:
        if repeated.digest not in (b"", digest_of(message.groups)):  # snapshots of an older version have no digest
            raise Refused(
                Code.OTHER_BODY,
                "A recent push with this key had other groups. Send each push with its own "
                "x-idempotency-key, or without one: its key is then derived from its body.",
            )
        yield Decision(replies=(CommandReply(message.id, Pushed(held=repeated.held)),))
        return
    check_queue(engine, "take rollout groups")
    if live.refusing_groups:
        raise Refused(Code.STORAGE_FULL, f"{live.refusing_groups} Try again when there is room.")
    if not 0 < len(message.groups) <= GROUPS_MAX or len(message.key) > KEY_CHARS_MAX:
        raise Refused(
            Code.MALFORMED, f"A push needs 1 to {GROUPS_MAX} groups, and a key of at most {KEY_CHARS_MAX} characters."
        )
    why = why_not_queued(state.queue, message.groups)
    if why:
        raise Refused(Code.MALFORMED, why)
    why = _why_no_room(hive, engine, message.groups)
    if why:
        raise Refused(Code.OVERLOADED, why)
    _check_bodies(hive, engine, message.groups)
    senders = {group.environment for group in message.groups if group.environment is not None}
    events: tuple[Event, ...] = tuple(event for each in sorted(senders) for event in again(engine, live, each))
    pushed = ev.GroupsPushed(at_ns=live.now_ns, engine=engine.name, groups=message.groups, key=message.key)
    held = tuple(held_after(state.queue, message.groups))
    yield Decision(events=(*events, pushed), replies=(CommandReply(message.id, Pushed(held=held)),))


def group_episodes(hive: Hive, live: Live, message: EpisodesGrouped) -> Decisions:
    """Queue a group made from ended episodes, and remove the episodes from the pool. Episodes that cannot form a group
    are dropped.

    Do nothing if the episodes have left the pool, or if there is no room yet: the leader will make the group again.
    """
    engine = hive.engine(message.engine)
    pool, group = engine.pool, message.group
    episodes = tuple(dict.fromkeys(message.episodes))
    if not engine.groups_episodes or message.run != engine.run or not all(each in pool for each in episodes):
        return
    why = message.why if group is None else why_not_queued(engine.trajectories.queue, (group,))
    if why or group is None:
        dropped = ev.GroupDropped(
            **live.at(engine),
            reason=DropReason.UNFIT,
            tasks=tuple(dict.fromkeys(pool[each].task for each in episodes)),
            episodes=episodes,
        )
        yield Decision(events=(dropped,))
        return
    try:
        _check_bodies(hive, engine, (group,))
    except Refused:
        return
    if not episodes or live.refusing_groups or _why_no_room(hive, engine, (group,)):
        return
    pushed = ev.GroupsPushed(
        at_ns=live.now_ns, engine=engine.name, groups=(group,), episodes=episodes, version=max(engine.version, 0)
    )
    yield Decision(events=(pushed,))


def _check_bodies(hive: Hive, engine: EngineState, groups: Iterable[QueuedGroup]) -> None:
    for group in groups:
        if group.body is not None and not group.body.seqs:
            raise Refused(Code.BODY_GONE, "There is room for this group, but its body is not stored yet: store it.")
        if group.body is None or not is_body(group.body) or group.tokens < 0 or group.longest < 0:
            raise Refused(Code.MALFORMED, "A group must be pushed with its body and its sizes: store it again.")
        if group.body.first < hive.groups_released(engine, group.holder):
            raise Refused(Code.BODY_GONE, "The body of this group was stored too long ago: store it again.")


def _why_no_room(hive: Hive, engine: EngineState, groups: Sequence[QueuedGroup]) -> str:
    """Return why there is no room for groups, either in the queue or for their holder in the stream. Return "" if there
    is room."""
    sizes: dict[str, int] = {}
    for group in groups:
        sizes[group.holder] = sizes.get(group.holder, 0) + (0 if group.body is None else group.body.size)
    for holder, size in sizes.items():
        if why := hive.why_no_groups(holder, size):
            return why
    return why_no_room(engine.trajectories.queue, groups)


def take(engine: EngineState, live: Live, message: TakeBatch) -> Decisions:
    """Hand out the next batch, or the last batch again if it was not delivered."""
    state = engine.trajectories
    if engine.queues_groups and engine.makes_steps:
        raise Refused(
            Code.UNSUPPORTED,
            f"Run {engine.run} of engine {engine.name} is trained by the engine's own trainer, which takes each batch "
            "itself. To use another trainer, stop the run and configure a job without collection.rollout_groups.",
        )
    if not engine.queues_groups or state.trainer is None:
        raise wrong_phase("hand out a batch", engine.phase, "Register a trainer first.")
    begun = ev.BatchesBegun(**live.at(engine))
    events: tuple[Event, ...] = () if state.begun else (begun,)
    number = 0
    batch = state.batch
    if message.after is not None:
        _check_after(engine, message.after)
        if batch is not None and message.after == batch.number and not batch.delivered:
            has_it = ev.BatchDelivered(**live.at(engine), number=batch.number)
            events = (*events, has_it)
    again = batch is not None and (not batch.delivered if message.after is None else message.after < batch.number)
    if batch is not None and again:
        number = batch.number
    else:
        groups = form(state.queue)
        if groups is not None:
            number = state.batches + 1
            handed = ev.BatchHandedOut(**live.at(engine), number=number, groups=groups)
            events = (*events, handed)
    reply = CommandReply(message.id, BatchTaken(run=engine.run, number=number, again=again))
    yield Decision(events=events, replies=(reply,))


def _check_after(engine: EngineState, after: int) -> None:
    """Raise `Refused` unless a trainer that has batch `after` can get the next one. Only the last batch is kept."""
    state = engine.trajectories
    newest = state.before if state.batch is None else state.batch.number
    if after not in (state.before, newest):
        known = f"{newest}" if newest == state.before else f"{state.before} or {newest}"
        raise Refused(
            Code.MALFORMED,
            f"Run {engine.run} of engine {engine.name} cannot continue after batch {after}: its trainer has batch "
            f"{known}. Ask for the batches after that one, or register to begin a new run.",
        )


def seal(engine: EngineState, live: Live) -> Decisions:
    """Seal the next batch for our own trainer, once replicas serve the last step's weights.

    If the queue did not yield a batch, it is not searched again until it has changed.
    """
    state, trainer = engine.trajectories, engine.trajectories.trainer
    if engine.batch is not None or engine.version < engine.step or trainer is None or engine.active is None:
        return
    queue = state.queue
    if engine.step >= trainer.num_steps or queue.sequences < queue.batch_size or not all_loaded(engine):
        return
    connected = sum(environment.connected for environment in queue.environments.values())
    seen = (engine.run, engine.step, queue.arrived, queue.joined, connected, queue.sequences)
    if live.unfilled.get(engine.name) == seen:
        return
    groups = form(queue)
    if groups is None:
        live.unfilled[engine.name] = seen
        return
    ready = ev.BatchReady(
        **live.at(engine), step=engine.step + 1, groups=(), config_digest=engine.active.config_digest, taken=groups
    )
    yield Decision(events=(ready,))


def give_up_old(engine: EngineState, live: Live) -> Decisions:
    """Give up groups of episodes that have waited in the queue for too many versions.

    With an outside trainer, there are no versions after the first, and all groups wait for that trainer.
    """
    most = engine.collection.max_carry_staleness
    old = engine.trajectories.queued_before(engine.version - most)
    why = (
        f"they have waited in the queue for more than max_carry_staleness ({most}) policy versions: they fit into no "
        "batch with the other queued groups, or groups were queued faster than they were used"
    )
    for some in portions(old, GROUPS_MAX):
        given_up = ev.GroupsGivenUp(**live.at(engine), number=0, groups=some, why=why)
        yield Decision(events=(given_up,))


def sent(engine: EngineState, live: Live, message: BatchSent) -> Decisions:
    """Note that a batch has reached its trainer. The trainer's next request gets a new batch."""
    batch = engine.trajectories.batch
    if batch is None or batch.delivered or (batch.run, batch.number) != (message.run, message.number):
        return
    delivered = ev.BatchDelivered(at_ns=live.now_ns, engine=engine.name, run=message.run, number=message.number)
    yield Decision(events=(delivered,))


def give_up(engine: EngineState, live: Live, message: GiveUpGroups) -> Decisions:
    """Drop groups whose bodies were found to be lost, provided that the log still names those bodies."""
    bodies = _bodies(engine, message) if message.run == engine.run else {}
    lost = tuple(sorted({each.group for each in message.groups if bodies.get(each.group) == each.first}))
    events: tuple[Event, ...] = ()
    if lost:
        given_up = ev.GroupsGivenUp(
            **live.at(engine), number=message.number, groups=lost, why=message.why[:WHY_CHARS_MAX]
        )
        events = (given_up,)
    yield Decision(events=events, replies=(CommandReply(message.id, Done(run=engine.run)),))


def _bodies(engine: EngineState, message: GiveUpGroups) -> dict[int, int]:
    """Return the numbers of the groups that the message may name, each with the sequence at which the group's body
    begins."""
    handed = engine.trajectories.batch
    groups: Iterable[tuple[int, QueuedGroup]] = ()
    if not message.number:
        queued = engine.trajectories.queue.groups
        groups = ((each.group, queued[each.group]) for each in message.groups if each.group in queued)
    elif engine.makes_steps:
        if engine.batch is not None and engine.batch.step == message.number:
            groups = zip(engine.batch.taken, engine.batch.rollout_groups, strict=False)
    elif handed is not None and not handed.delivered and handed.number == message.number:
        groups = zip(handed.numbers, handed.groups, strict=False)
    return {number: group.body.first for number, group in groups if group.body is not None}


def move(hive: Hive, live: Live, message: BodiesStored) -> Decisions:
    """Note where groups' bodies are now. The recorded places do not change for groups in a batch that is still being
    delivered."""
    engine = hive.engine(message.engine)
    movable = dict(engine.trajectories.movable(live.now_ns))
    moved = tuple(
        each
        for each, was in zip(message.moved, message.was, strict=False)
        if (group := movable.get(each.group)) is not None
        and group.body is not None
        and (group.body.first, group.body.digest) == (was, each.body.digest)
        and is_body(each.body)
        and each.body.first >= hive.groups_released(engine, group.holder)
    )
    if moved:
        yield Decision(events=(ev.BodiesMoved(at_ns=live.now_ns, engine=engine.name, moved=moved),))


def release(hive: Hive, live: Live, message: TrajectoriesStored) -> Decisions:
    """Release the bodies before `below` that no group needs. Senders may still name bodies from `below` on.

    Once the release is on the log, groups with older bodies are refused, so a purged body is never needed later.
    """
    if message.shrunk:
        yield from _lowered(hive, live, message.below)
        return
    released = hive.released_of_holders()
    floors = dict.fromkeys(released, message.below)
    for engine_name, holder, body in hive.bodies_needed():
        if body.first < floors.get((engine_name, holder), message.below):
            floors[engine_name, holder] = body.first
    below = max(hive.trajectories_released, min((message.below, *floors.values())))
    own = [
        ev.HolderFloor(*each, floor)
        for each, floor in floors.items()
        if message.overfull and floor > max(below, released.get(each, 0))
    ]
    if below > max(hive.trajectories_released, 1) or own:
        event = ev.TrajectoriesReleased(at_ns=live.now_ns, below=below, holders=tuple(own[:FLOORS_MAX]))
        yield Decision(events=(event,))


def _lowered(hive: Hive, live: Live, end: int) -> Decisions:
    """Lower the released bound to the new end of a stream that has lost its end, since later sequences will be
    reused."""
    own = tuple(ev.HolderFloor(*each, end) for each, floor in hive.released_of_holders().items() if floor > end)
    below = min(hive.trajectories_released, end)
    if below < hive.trajectories_released or own:
        yield Decision(events=(ev.TrajectoriesReleased(at_ns=live.now_ns, below=below, holders=own),))
