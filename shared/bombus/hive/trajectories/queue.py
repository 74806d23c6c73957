"""Rollout groups that wait for a batch, and the environments that pushed them: a part of an engine's state.

The functions below are the fold of this part. For each group, the state keeps its size and the place of its body. The
groups that have the same environment and the same size form a line, in order of arrival. Batches are formed from these
lines alone (see `forming`).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite

import msgspec

from bombus.figures import byte_size
from bombus.hive.bounded import trim
from bombus.hive.records import BodyRef
from bombus.hive.shares import has_share, has_share_of_stream, share_name
from bombus.hive.trajectories.filling import ExactFill, Pool

BATCH_SEQUENCES_MAX = 16_384
GROUPS_MAX = 1_000_000  # queued groups of all environments; at the limit, each key still has its share
HELD_MAX = 4_096  # groups of one environment that wait to be combined
ENVIRONMENTS_MAX = 1_024  # connected or remembered; an environment that has left is remembered while it has groups
NAMES_KEPT = 4_096  # environment names whose next number is remembered
SHARE_MIN, SHARE_MAX = 0.01, 1e6  # the bounds to which the weight of an environment is clamped
OTHERS = -1  # in place of an environment, for groups that have none or an unknown one
SIZES_HELD_MAX = 64  # distinct sizes of held groups that are considered for a combination: those held first
CUT_AT = 64  # a line is shortened once more than this many of its groups, and more than half of them, are gone


class QueuedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rollout group. `environment` is None if the group was pushed without an environment, or with an unknown one.

    The group counts towards the share of `holder`, and its body is on that holder's subject (see
    `Subjects.trajectory`).
    """

    environment: int | None
    sequences: int
    tokens: int = 0
    longest: int = 0  # tokens of its longest sequence
    body: BodyRef | None = None
    holder: str = ""


class GroupLine(msgspec.Struct):
    """Groups of one size, oldest first. The entries of `numbers` before `start` do not count, nor do those of groups
    that have left the queue."""

    numbers: list[int] = []
    start: int = 0
    count: int = 0  # number of groups that are still queued


class EnvironmentShare(msgspec.Struct):
    """The groups of an environment that a batch can take, and how much has been taken so far.

    `served` is the environment's virtual time: the number of sequences taken, divided by its weight.
    """

    lines: dict[int, GroupLine] = {}  # keyed by the number of sequences in each group
    sequences: int = 0
    served: float = 0.0


class KeptGroups(msgspec.Struct):
    """The queued groups of one holder, and the bytes of their bodies.

    The holder's bodies before the sequence number `released` in the stream `trajectories` may be purged.
    """

    groups: int = 0
    bytes: int = 0
    released: int = 0


class Environment(msgspec.Struct, kw_only=True):
    """An environment that pushes groups. Once it has left, it is kept for as long as a batch can still take one of its
    groups."""

    id: int
    name: str
    max_tokens: int
    weight: float
    group_size: int
    minimum: float | None = None  # the fraction of each batch that it requests
    owner: str = ""  # the name of its client's key
    admin: bool = False  # whether that key is the hive's admin key
    connected: bool = True
    share: EnvironmentShare = msgspec.field(default_factory=EnvironmentShare)
    held: dict[int, GroupLine] = {}  # groups below group_size, keyed by size: they wait to be combined to group_size
    held_groups: int = 0
    held_sequences: int = 0

    @property
    def holder(self) -> str:
        """Return the holder whose share the environment counts towards."""
        return share_name(self.owner, self.admin)

    @property
    def part(self) -> float:
        """Return the environment's weight, clamped to the allowed range. NaN counts as the lowest weight."""
        return min(self.weight, SHARE_MAX) if self.weight > SHARE_MIN else SHARE_MIN


class TrajectoryQueue(msgspec.Struct, kw_only=True):
    """All queued groups, keyed by number and in order of arrival. `combined` maps a number to the groups that were
    combined under it.

    Groups that were combined are in a line under the number of the last of them, with their total size. `clock` is the
    virtual time of the batches taken so far: environments that join later begin there.
    """

    batch_size: int = 0  # number of sequences; 0 before a trainer has registered
    groups: dict[int, QueuedGroup] = {}
    combined: dict[int, tuple[int, ...]] = {}
    environments: dict[int, Environment] = {}
    others: EnvironmentShare = msgspec.field(default_factory=EnvironmentShare)  # groups without a known environment
    arrived: int = 0
    joined: int = 0
    named: dict[str, int] = {}  # how many environments have joined under each name
    tokens: int = 0  # total of all queued groups
    bytes: int = 0  # total of their bodies
    holders: dict[str, KeptGroups] = {}  # all holders that have ever had a group
    clock: float = 0.0

    def __post_init__(self) -> None:
        if self.groups and not self.holders:  # a snapshot from an earlier release, which did not count by holder
            self.tokens = 0
            for group in self.groups.values():
                self.count(group, 1)

    @property
    def sequences(self) -> int:
        """Return the number of sequences available for batches, not counting held groups."""
        return self.others.sequences + sum(each.share.sequences for each in self.environments.values())

    @property
    def held_groups(self) -> int:
        return sum(each.held_groups for each in self.environments.values())

    def owner_of(self, group: QueuedGroup) -> int:
        """Return the environment whose share a group is in, or `OTHERS` if it has no known environment."""
        environment = OTHERS if group.environment is None else group.environment
        return environment if environment in self.environments else OTHERS

    def kept_of(self, holder: str) -> KeptGroups:
        return self.holders.get(holder) or self.holders.setdefault(holder, KeptGroups())

    def count(self, group: QueuedGroup, sign: int) -> None:
        """Count a group that was queued (`sign` 1) or has left the queue (-1)."""
        kept = self.kept_of(group.holder)
        kept.groups += sign
        self.tokens += sign * group.tokens
        if group.body is not None:
            size = sign * group.body.size
            kept.bytes += size
            self.bytes += size

    def share_of(self, owner: int) -> EnvironmentShare:
        known = self.environments.get(owner)
        return self.others if known is None else known.share

    def weight_of(self, owner: int) -> float:
        """Return an environment's clamped weight. Groups without a known environment have a weight of 1."""
        known = self.environments.get(owner)
        return 1.0 if known is None else known.part

    def shares(self) -> Iterator[tuple[int, EnvironmentShare]]:
        """Yield the environments (including `OTHERS`) that have groups a batch can take, with their shares."""
        if self.others.sequences:
            yield OTHERS, self.others
        for environment in self.environments.values():
            if environment.share.sequences:
                yield environment.id, environment.share

    def waiting(self, line: GroupLine) -> Iterator[int]:
        """Yield the numbers of the groups in a line that are still queued, oldest first."""
        numbers = map(line.numbers.__getitem__, range(line.start, len(line.numbers)))
        return (number for number in numbers if number in self.groups)

    def members(self, number: int) -> tuple[int, ...]:
        """Return the numbers of the groups to which a number in a line refers."""
        return self.combined.get(number, (number,))

    def name_for(self, desired: str) -> str:
        """Return the name that the next environment to request the name `desired` gets."""
        return f"{desired}_{self.named.get(desired, 0)}"


# ---- refusals ---------------------------------------------------------------------------------------------------


def why_not_queued(queue: TrajectoryQueue, groups: Sequence[QueuedGroup]) -> str:
    """Return why these groups can never be queued, as a sentence for the client, or "" if they can."""
    for position, group in enumerate(groups):
        if group.sequences < 1:
            return f"Group {position} has no sequences. Send at least one."
        if queue.batch_size and group.sequences > queue.batch_size:
            return (
                f"Group {position} has {group.sequences} sequences, but a batch has {queue.batch_size}: no batch could "
                "ever take it. Send smaller groups, or register the trainer with a larger batch_size."
            )
    return ""


def why_no_room(queue: TrajectoryQueue, groups: Sequence[QueuedGroup]) -> str:
    """Return why there is no room for these groups yet, as a sentence for the client, or "" if there is room."""
    if len(queue.groups) + len(groups) > GROUPS_MAX:
        kept = {holder: each.groups for holder, each in queue.holders.items()}
        arriving_of = Counter(group.holder for group in groups)
        if not all(has_share(kept, holder, GROUPS_MAX, more) for holder, more in arriving_of.items()):
            return (
                f"{len(queue.groups)} groups are queued, but there is room for {GROUPS_MAX} of all keys together, and "
                "this key would have more than its share. Send them again after the trainer has taken batches."
            )
    arriving: dict[int, int] = {}
    for group in groups:
        holder = _holder(queue, group)
        if holder is not None:
            arriving[holder.id] = arriving.get(holder.id, 0) + 1
    for each, count in arriving.items():
        environment = queue.environments[each]
        if environment.held_groups + count > HELD_MAX:
            return (
                f"{environment.held_groups} groups of environment {each} ({environment.name}) are waiting for others "
                f"to make up its group_size of {environment.group_size}, but there is room for {HELD_MAX}. Send groups "
                "of that size, or register the environment again with the size that it sends."
            )
    return ""


def why_no_share(kept: Mapping[str, int], holder: str, size: int, more: int) -> str:
    """Return why a holder may not queue `more` bytes in a stream of `size` bytes, or "" if the holder may."""
    if has_share_of_stream(kept, holder, size, more):
        return ""
    return (
        f"The queued groups of this key take {byte_size(kept.get(holder, 0))}, and those of all keys "
        f"{byte_size(sum(kept.values()))} of {byte_size(size)}. With {byte_size(more)} more, this key would have more "
        "than its share. Send them again after the trainer has taken batches, or raise the limit with "
        "--trajectories-bytes-max."
    )


def why_no_batch_size(batch_size: int) -> str:
    """Return why a trainer cannot have batches with this many sequences, or "" if it can."""
    if 1 <= batch_size <= BATCH_SEQUENCES_MAX:
        return ""
    return f"batch_size is {batch_size}: it must be from 1 to {BATCH_SEQUENCES_MAX} sequences."


def why_not_joined(queue: TrajectoryQueue, environment: Environment) -> str:
    """Return why an environment cannot join, or "" if it can."""
    name = environment.name
    if environment.group_size < 1:
        return f"group_size of {name} is {environment.group_size}: it must be at least 1."
    if not isfinite(environment.weight):
        return f"weight of {name} is {environment.weight}: it must be a finite number."
    if environment.minimum is not None and not 0 <= environment.minimum <= 1:
        return (
            f"min_batch_allocation of {name} is {environment.minimum}: it must be a fraction of a batch, from 0 to 1."
        )
    connected = Counter(each.holder for each in queue.environments.values() if each.connected)
    if environment.id not in queue.environments and not has_share(connected, environment.holder, ENVIRONMENTS_MAX):
        return (
            f"{connected.total()} environments are connected, {connected[environment.holder]} of them by this key, and "
            f"the limit for all keys together is {ENVIRONMENTS_MAX}. Disconnect environments that have ended."
        )
    return ""


def no_environment(number: int) -> str:
    return f"There is no environment {number}: register it first."


def held_after(queue: TrajectoryQueue, groups: Sequence[QueuedGroup]) -> list[int | None]:
    """Return how many sequences each group's environment would hold after the push, or None for a group that would not
    be held.

    The push is answered with these numbers. The queue is not changed.
    """
    trial = TrajectoryQueue(batch_size=queue.batch_size, arrived=queue.arrived)
    for group in groups:
        holder = _holder(queue, group)
        if holder is not None and holder.id not in trial.environments:
            trial.environments[holder.id] = msgspec.structs.replace(
                holder,
                share=EnvironmentShare(),
                held={
                    size: msgspec.structs.replace(line, numbers=[*line.numbers]) for size, line in holder.held.items()
                },
            )
            held = (number for line in holder.held.values() for number in queue.waiting(line))
            trial.groups.update((number, queue.groups[number]) for number in held)
    answers: list[int | None] = []
    for group in groups:
        holder = _holder(trial, group)
        _add(trial, group)
        answers.append(None if holder is None else holder.held_sequences)
    return answers


# ---- the fold -----------------------------------------------------------------------------------------------


def register(queue: TrajectoryQueue, batch_size: int) -> None:
    """Set the batch size. Groups pushed before any trainer registered are kept; groups left over from an earlier
    trainer are dropped."""
    if queue.batch_size:
        reset(queue)
    queue.batch_size = batch_size


def reset(queue: TrajectoryQueue) -> None:
    """Forget all groups and environments. Group numbers keep counting up, and released sequences stay released."""
    queue.batch_size = queue.joined = queue.tokens = queue.bytes = 0
    queue.clock = 0.0
    for kept in queue.holders.values():
        kept.groups = kept.bytes = 0
    queue.others = EnvironmentShare()
    for known in (queue.groups, queue.combined, queue.environments, queue.named):
        known.clear()


def join(queue: TrajectoryQueue, environment: Environment, desired_name: str = "") -> None:
    """Add or reconnect an environment. A reconnected environment keeps its groups, and its held groups are queued."""
    known = queue.environments.get(environment.id)
    leave(queue, environment.id)
    if known is not None:
        environment.share = known.share
    else:
        queue.joined = max(queue.joined, environment.id + 1)
        queue.named[desired_name] = queue.named.get(desired_name, 0) + 1
        trim(queue.named, NAMES_KEPT)
    queue.environments[environment.id] = environment
    _forget_environments(queue)


def leave(queue: TrajectoryQueue, environment: int) -> None:
    """Disconnect an environment that has left or fallen silent. Its groups stay, and the groups that it held are
    queued."""
    known = queue.environments.get(environment)
    if known is None:
        return
    known.connected = False
    for size, line in sorted(known.held.items()):
        for number in list(queue.waiting(line)):
            _enqueue(queue, known.share, number, size)
    known.held = {}
    known.held_groups = known.held_sequences = 0
    _forget_environments(queue)


def push(queue: TrajectoryQueue, groups: Iterable[QueuedGroup]) -> None:
    """Queue groups under the next numbers, and combine held groups that add up to their environment's group_size."""
    for group in groups:
        queue.count(group, 1)
        _add(queue, group)


def _add(queue: TrajectoryQueue, group: QueuedGroup) -> None:
    queue.arrived += 1
    number = queue.arrived
    owner = queue.owner_of(group)
    queue.groups[number] = group if owner != OTHERS else msgspec.structs.replace(group, environment=None)
    holder = _holder(queue, group)
    if holder is None:
        _enqueue(queue, queue.share_of(owner), number, group.sequences)
    else:
        _hold(queue, holder, number, group.sequences)


def take(queue: TrajectoryQueue, numbers: Iterable[int]) -> list[QueuedGroup]:
    """Remove the groups of a batch and return them, oldest first. Count their sequences as served for their shares.

    The numbers of held groups and of parts of a combination are skipped, since no batch can contain them on their own.
    """
    gone = sorted({number for number in numbers if is_queued(queue, number)})
    together = {number: queue.combined.pop(number) for number in gone if number in queue.combined}
    inner = {each for members in together.values() for each in members}
    taken = {number: queue.groups.pop(number) for number in sorted(inner.union(gone)) if number in queue.groups}
    served: dict[int, int] = {}
    for number, group in taken.items():
        queue.count(group, -1)
        if number in inner and number not in together:
            continue
        size = sum(taken[each].sequences for each in together.get(number, (number,)) if each in taken)
        owner = queue.owner_of(group)
        served[owner] = served.get(owner, 0) + size
        _removed(queue, queue.share_of(owner), size)
    starts = {owner: virtual_time(queue, owner) for owner in served}
    for owner, sequences in served.items():
        queue.share_of(owner).served = starts[owner] + sequences / queue.weight_of(owner)
    queue.clock = max(queue.clock, min(starts.values(), default=0.0))
    _forget_environments(queue)
    return list(taken.values())


def is_queued(queue: TrajectoryQueue, number: int) -> bool:
    """Return whether a number is in a line, as a single group or as several groups that were combined."""
    group = queue.groups.get(number)
    if group is None:
        return False
    size = sum(queue.groups[each].sequences for each in queue.members(number))
    line = queue.share_of(queue.owner_of(group)).lines.get(size)
    at = 0 if line is None else bisect_left(line.numbers, number, line.start)
    return line is not None and line.numbers[at : at + 1] == [number]


def put_back(
    queue: TrajectoryQueue,
    groups: Mapping[int, QueuedGroup],
    combined: Mapping[int, tuple[int, ...]],
    lost: Iterable[int] = (),
) -> None:
    """Return a batch's groups, given by number, to the queue. Forget the groups that are `lost`.

    The groups get their old places. Combined groups stay together unless one of them is lost: then the others wait to
    be combined with other groups. The batch's sequences no longer count as served.
    """
    for group in groups.values():
        owner = queue.owner_of(group)
        queue.share_of(owner).served -= group.sequences / queue.weight_of(owner)
    kept = {number: group for number, group in groups.items() if number not in set(lost)}
    together = {number: members for number, members in combined.items() if all(each in kept for each in members)}
    apart = {each for number, members in combined.items() if number not in together for each in members}
    for number in apart & combined.keys():
        size = sum(groups[each].sequences for each in combined[number])
        _erase(queue.share_of(queue.owner_of(groups[number])), number, size)
    _queue_again(queue, kept, together, apart)


def give_up(queue: TrajectoryQueue, numbers: Iterable[int]) -> None:
    """Forget queued groups. Groups that were combined with a forgotten group wait to be combined with others."""
    for number in numbers:
        group = queue.groups.get(number)
        if group is None:
            continue
        holder = queue.environments.get(queue.owner_of(group))
        if holder is not None and _is_held(holder, number, group.sequences):
            _let_go(holder, number, group.sequences)
            del queue.groups[number]
            queue.count(group, -1)
            continue
        whole = next((each for each, members in queue.combined.items() if number in members), number)
        taken = {each: queue.groups.pop(each) for each in queue.combined.pop(whole, (number,))}
        for each in taken.values():
            queue.count(each, -1)
        size, share = sum(each.sequences for each in taken.values()), queue.share_of(queue.owner_of(group))
        _removed(queue, share, size)
        _erase(share, whole, size)
        del taken[number]
        _queue_again(queue, taken, {}, taken)
    _forget_environments(queue)


def _queue_again(
    queue: TrajectoryQueue,
    groups: Mapping[int, QueuedGroup],
    together: Mapping[int, tuple[int, ...]],
    apart: Container[int],
) -> None:
    """Queue groups again under their old numbers. Groups in `apart` used to be combined, but no longer are."""
    inner = {each for members in together.values() for each in members}
    for number, group in sorted(groups.items()):
        owner = queue.owner_of(group)
        queue.groups[number] = group if owner != OTHERS else msgspec.structs.replace(group, environment=None)
        queue.count(group, 1)
    for number, group in sorted(groups.items()):
        share = queue.share_of(queue.owner_of(group))
        if number in together:
            queue.combined[number] = together[number]
            _enqueue(queue, share, number, sum(groups[each].sequences for each in together[number]))
        elif number not in inner:
            holder = _holder(queue, group) if number in apart else None
            if holder is None:
                _enqueue(queue, share, number, group.sequences)
            else:
                _hold(queue, holder, number, group.sequences)


def virtual_time(queue: TrajectoryQueue, owner: int) -> float:
    """Return the virtual time of an environment's next turn. The environment with the lowest virtual time is served
    next.

    This is start-time fair queueing (Goyal, Vin and Cheng, "Start-time fair queueing", SIGCOMM 1996). An environment
    that had no groups to take begins at the queue's `clock`. If it had groups that fitted into no batch, it may catch
    up by one batch.
    """
    credit = queue.batch_size / queue.weight_of(owner)
    return max(queue.share_of(owner).served, queue.clock - credit)


def _holder(queue: TrajectoryQueue, group: QueuedGroup) -> Environment | None:
    """Return the environment that holds this group to combine it with others, or None if the group is not held.

    A group that could never be part of a combination is queued without being held: one that is not smaller than its
    environment's group_size, or one whose group_size is larger than a batch.
    """
    environment = queue.environments.get(queue.owner_of(group))
    if environment is None or not environment.connected or group.sequences >= environment.group_size:
        return None
    return None if environment.group_size > queue.batch_size else environment


def _enqueue(queue: TrajectoryQueue, share: EnvironmentShare, number: int, size: int) -> None:
    if not share.sequences:
        share.served = max(share.served, queue.clock)
    line = share.lines.setdefault(size, GroupLine())
    _insert(line, number)
    share.sequences += size


def _insert(line: GroupLine, number: int) -> None:
    """Add a group to a line: at its end, or at its old place if the group was queued before."""
    numbers = line.numbers
    at = bisect_left(numbers, number, line.start) if numbers and number < numbers[-1] else len(numbers)
    if numbers[at : at + 1] != [number]:
        numbers.insert(at, number)
    line.count += 1


def _erase(share: EnvironmentShare, number: int, size: int) -> None:
    """Remove a group's number from the line to which the group no longer belongs, if the line still contains the
    number."""
    line = share.lines.get(size)
    at = 0 if line is None else bisect_left(line.numbers, number, line.start)
    if line is not None and line.numbers[at : at + 1] == [number]:
        del line.numbers[at]


def _hold(queue: TrajectoryQueue, environment: Environment, number: int, size: int) -> None:
    _insert(environment.held.setdefault(size, GroupLine()), number)
    environment.held_groups += 1
    environment.held_sequences += size
    together = combination(queue, environment, size)
    if not together:
        return
    for each in together:
        _let_go(environment, each, queue.groups[each].sequences)
    queue.combined[together[-1]] = together
    _enqueue(queue, environment.share, together[-1], environment.group_size)


def _is_held(environment: Environment, number: int, size: int) -> bool:
    return size in environment.held and number in environment.held[size].numbers


def _let_go(environment: Environment, number: int, size: int) -> None:
    """Stop holding a group."""
    environment.held_groups -= 1
    environment.held_sequences -= size
    held = environment.held[size]
    held.numbers.remove(number)
    held.count -= 1
    if not held.count:
        del environment.held[size]


def combination(queue: TrajectoryQueue, environment: Environment, newest: int) -> tuple[int, ...]:
    """Return held groups of an environment that add up to exactly its group_size, preferring the oldest.

    `newest` is the size of the most recently held group. If there are very many sizes, only `newest` and the sizes that
    have been held longest are considered.
    """
    if environment.held_sequences < environment.group_size:
        return ()
    sizes = [*islice((size for size in environment.held if size != newest), SIZES_HELD_MAX - 1), newest]
    held = {size: environment.held[size] for size in sizes}
    fill = ExactFill([Pool({size: line.count for size, line in held.items()})], environment.group_size)
    if not fill.exists:
        return ()
    waiting = sorted((number, size) for size, line in held.items() for number in queue.waiting(line))
    chosen: list[int] = []
    for number, size in waiting:
        if not fill.left:
            break
        if fill.take(0, size):
            chosen.append(number)
    return tuple(chosen)


def _removed(queue: TrajectoryQueue, share: EnvironmentShare, size: int) -> None:
    """Account for a group that has left a line, and shorten the line if many of its groups are gone."""
    line = share.lines[size]
    line.count -= 1
    share.sequences -= size
    if not line.count:
        del share.lines[size]
        return
    while line.start < len(line.numbers) and line.numbers[line.start] not in queue.groups:
        line.start += 1
    if line.start > max(CUT_AT, len(line.numbers) // 2):
        del line.numbers[: line.start]
        line.start = 0


def _forget_environments(queue: TrajectoryQueue) -> None:
    """Forget disconnected environments with no queued groups, earliest first, while there are too many environments."""
    if len(queue.environments) <= ENVIRONMENTS_MAX:
        return
    done = [each.id for each in queue.environments.values() if not each.connected and not each.share.sequences]
    for environment in done[: max(0, len(queue.environments) - ENVIRONMENTS_MAX)]:
        del queue.environments[environment]
