"""Put rollout groups on the log, and read the batches that are handed out."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from bombus.bus.large.parts import Parts
from bombus.errors import Code, LogCorrupted, Refused
from bombus.hive import inbox
from bombus.hive.operations.owners import may_use
from bombus.hive.records import BodyRef, digest
from bombus.hive.state import EngineState, Phase
from bombus.hive.trajectories.queue import QueuedGroup, why_not_queued
from bombus.hive.trajectories.records import RolloutGroup, decode_group
from bombus.hive.trajectories.state import HandedOut, Trajectories
from bombus.hive.trajectories.training import why_not_trained
from bombus.task_groups import first_failure
from bombus_gateway.access import NOBODY, KeyHolder
from bombus_gateway.atropos.scored_data import record_of
from bombus_gateway.bodies import TRAJECTORIES
from bombus_gateway.call.workers import CLIENTS
from bombus_gateway.context import Gateway
from bombus_gateway.rollout_groups.reading import RecordReader

ARRIVAL_S = 1.0  # how long to wait for the log to say that a sent batch has arrived
ATTEMPTS_MAX = 4
WRITERS_MAX = 4  # number of threads that write the parts of batches
AT_ONCE_MAX = 16  # bodies that one request stores or fetches concurrently
_T = TypeVar("_T")
_GivenT = TypeVar("_GivenT")


class Recorded(NamedTuple):
    """The record of a group, and its digest."""

    body: bytes
    digest: bytes


class GroupLog:
    """The rollout groups of one engine."""

    def __init__(self, gateway: Gateway, engine: str) -> None:
        self._gateway = gateway
        self.engine = engine
        self._parts = Parts(gateway.bus, gateway.bus.subjects.trajectories_stream)
        self._writers = ThreadPoolExecutor(WRITERS_MAX, "batch")
        self._lost: set[BodyRef] = set()  # bodies found missing while sending a batch; the next attempt checks them

    @property
    def state(self) -> EngineState:
        return self._gateway.follower.hive.engine(self.engine)

    @property
    def trajectories(self) -> Trajectories:
        return self.state.trajectories

    def touch(self, environment: int) -> None:
        """Report that this environment is alive."""
        self._gateway.heartbeats.touch_environment(self.engine, environment)

    def may_act_for(self, environment: int, holder: str) -> bool:
        """Return whether the holder of a key may act for an environment: it must be unknown or belong to the holder."""
        known = self.trajectories.queue.environments.get(environment)
        return known is None or may_use(known.owner, holder)

    async def _apart(self, size: int, compute: Callable[[], _T]) -> _T:
        """Return the result of `compute`. If `size` is large, run it in a thread, so that other requests can
        continue."""
        return await self._gateway.workers.run(CLIENTS, size, compute, TRAJECTORIES.inline_bytes)

    async def written(self, write: Callable[..., _T], *given: object) -> _T:
        """Return the result of `write`, run in a thread that may wait for records.

        This does not use the threads of `asyncio.to_thread`, because those are needed to read records: if all of them
        waited for records, none could be read.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writers, write, *given)

    # ---- in -------------------------------------------------------------------------------------------------------

    async def push(
        self, groups: Sequence[RolloutGroup], key: str = "", sender: KeyHolder = NOBODY
    ) -> tuple[int | None, ...]:
        """Put groups on the log, all or none. For each group, return how many sequences its environment then holds.

        The number is None if the group was queued immediately. When this returns, the groups are durable. A group loses
        its environment if the environment is unknown or belongs to a key other than the sender's.

        Without a `key`, a push of the same bytes within a short time is a repeat. The coordinator measures that time,
        since the fold's only clock is the time of the last event. Raises `Refused` for groups that cannot be queued,
        and `BusUnavailable` if the bus does not answer.
        """
        holder = sender.name
        groups = await self._as_sent_by(holder, groups)
        await self._check_queued(groups)
        await self._check_trained(groups)
        records = await self._apart(_bytes_of(groups), lambda: [_recorded(group) for group in groups])
        key = _own_key(f"{holder}//{key}" if holder else key, groups) if key else _key_of(records, holder)
        unstored = [BodyRef(seqs=(), size=len(record.body), digest=record.digest) for record in records]
        asks_first = self._may_be_refused(key, sender.share, sum(body.size for body in unstored))
        for attempt in range(1, ATTEMPTS_MAX + 1):
            bodies = unstored if attempt == 1 and asks_first else await self._store(sender.share, records)
            queued = tuple(_queued(group, body, sender.share) for group, body in zip(groups, bodies, strict=True))
            message = inbox.PushGroups(id=uuid.uuid4().hex, engine=self.engine, groups=queued, key=key)
            try:
                answer = await self._gateway.carry_out(message)
            except Refused as refusal:
                if refusal.code is not Code.BODY_GONE or attempt == ATTEMPTS_MAX:
                    raise
                continue
            assert isinstance(answer, inbox.Pushed)
            return answer.held
        raise AssertionError("the last attempt has returned or raised")

    async def _as_sent_by(self, holder: str, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        """Return groups, dropping each environment that is unknown or that the holder of a key may not act for."""
        named = {group.environment for group in groups if group.environment is not None}
        if not holder or not named:
            return groups
        known = self.trajectories.queue.environments
        if not named <= known.keys():  # one may have joined through another gateway
            with suppress(TimeoutError):
                await self._gateway.follower.caught_up(ARRIVAL_S)
            known = self.trajectories.queue.environments
        own = {each for each in named if each in known and may_use(known[each].owner, holder)}
        return [
            group if group.environment in own else msgspec.structs.replace(group, environment=None) for group in groups
        ]

    async def _check_queued(self, groups: Sequence[RolloutGroup]) -> None:
        """Raise `Refused` for a group that can never be queued, so that the group's body does not fill the stream.

        A trainer that has just registered may not be in the fold yet, so catch up with the log before refusing.
        """
        sizes = [QueuedGroup(environment=group.environment, sequences=group.sequences) for group in groups]
        if not why_not_queued(self.trajectories.queue, sizes):
            return
        with suppress(TimeoutError):  # on a timeout, let the coordinator decide
            await self._gateway.follower.caught_up(ARRIVAL_S)
            why = why_not_queued(self.trajectories.queue, sizes)
            if why:
                raise Refused(Code.MALFORMED, why)

    async def _check_trained(self, groups: Sequence[RolloutGroup]) -> None:
        """Raise `Refused` for a group that cannot be trained on by this engine's own trainer, if that trainer uses the
        batches."""
        trainer = self.trajectories.trainer
        if trainer is None or not self.state.makes_steps:
            return
        most = trainer.max_token_len
        whys = await self._apart(_bytes_of(groups), lambda: [why_not_trained(group, most) for group in groups])
        for number, why in enumerate(whys):
            if why:
                raise Refused(Code.MALFORMED, f"Group {number} of this push: {why}" if len(groups) > 1 else why)

    def _may_be_refused(self, key: str, share: str, size: int) -> bool:
        """Return whether a push may be refused or may be a repeat. Storing its bodies would then only fill the stream.

        In that case, ask the coordinator before storing the bodies. It answers BODY_GONE if they are needed.
        """
        takes_none = self.state.phase != Phase.OFFLINE and not self.state.queues_groups
        is_repeated = key in self.trajectories.pushes
        return takes_none or is_repeated or bool(self._gateway.follower.hive.why_no_groups(share, size))

    async def _store(self, share: str, records: Sequence[Recorded]) -> list[BodyRef]:
        subject = self._gateway.bus.subjects.trajectory(self.engine, share)

        async def store(record: Recorded) -> BodyRef:
            return await self._parts.store(subject, record.body, known=record.digest)

        return await _each(store, records) if len(records) > 1 else [await store(records[0])]

    # ---- out ------------------------------------------------------------------------------------------------------

    async def take(self, after: int | None = None) -> HandedOut | None:
        """Return the next batch if there is one, or the last one if it was not delivered.

        A fast trainer may ask for the next batch before the log says that its last one has arrived, so wait for that
        event. A trainer that says which batch it has (`after`) gets the batch that follows. Raises `Refused`
        WRONG_PHASE before a trainer has registered, and `BusUnavailable` if the bus does not answer.
        """
        for _ in range(ATTEMPTS_MAX):
            answer = await self._gateway.carry_out(
                inbox.TakeBatch(id=uuid.uuid4().hex, engine=self.engine, after=after)
            )
            assert isinstance(answer, inbox.BatchTaken)
            if not answer.number:
                return None
            if answer.again and after is None and await self._arrives(answer):
                continue
            batch = self.trajectories.batch
            if batch is not None and (batch.run, batch.number) == (answer.run, answer.number):
                return batch
        raise Refused(Code.OVERLOADED, "Other requests take batches faster than this gateway reads them: ask again.")

    async def _arrives(self, taken: inbox.BatchTaken) -> bool:
        """Wait briefly until a batch is known to have arrived or is no longer the last one. Return False on a
        timeout."""

        def is_over(_: object) -> bool:
            batch = self.trajectories.batch
            return batch is None or (batch.run, batch.number) != (taken.run, taken.number) or batch.delivered

        try:
            await self._gateway.follower.wait_for(is_over, ARRIVAL_S)
        except TimeoutError:
            return False
        return True

    async def give_up_lost(self, batch: HandedOut) -> None:
        """Give up those of a batch's groups whose bodies are lost, according to the stream's leader.

        Raises `Refused` if the groups cannot be given up, and `BusUnavailable` if the bus cannot tell which bodies are
        lost.
        """
        groups = [each for each in zip(batch.numbers, batch.groups, strict=False) if each[1].body is not None]
        found = [each for each in await _each(self._why_lost, groups) if each is not None]
        if found:
            lost, whys = zip(*found, strict=True)
            message = inbox.GiveUpGroups(
                id=uuid.uuid4().hex, engine=self.engine, run=batch.run, number=batch.number, groups=lost, why=whys[-1]
            )
            await self._gateway.carry_out(message)

    async def _why_lost(self, numbered: tuple[int, QueuedGroup]) -> tuple[inbox.LostGroup, str] | None:
        number, group = numbered
        assert group.body is not None
        try:
            await self._parts.fetch(group.body)
        except LogCorrupted as error:
            return inbox.LostGroup(number, group.body.first), str(error)
        return None

    async def delivered(self, batch: HandedOut) -> None:
        """Report that the whole batch was sent."""
        sent = inbox.BatchSent(id=uuid.uuid4().hex, engine=self.engine, run=batch.run, number=batch.number)
        await self._gateway.bus.inbox.send(sent)

    async def records(self, groups: Sequence[QueuedGroup]) -> RecordReader:
        """Return a reader of the groups' records. The first records, and any that were missing earlier, are read
        immediately.

        Raises `LogCorrupted` if one of these records is gone, and `BusUnavailable` if the bus does not answer. For
        later records, the reader raises these errors.
        """
        refs = [group.body for group in groups if group.body is not None]
        for ref in self._lost.intersection(refs):
            await self._parts.fetch(ref)
            self._lost.discard(ref)
        reader = RecordReader(self._parts.fetch, refs, self._lost.add)
        await reader.begin()
        return reader

    async def latest(self, holder: str) -> RolloutGroup | None:
        """Return the group that was pushed last, or None if its environment belongs to another key."""
        latest = self.trajectories.latest
        if latest is None or (latest.environment is not None and not self.may_act_for(latest.environment, holder)):
            return None
        record = await (await self.records([latest])).next()
        return None if record is None else await self._apart(len(record), partial(decode_group, record))


async def _each(do: Callable[[_GivenT], Awaitable[_T]], given: Sequence[_GivenT]) -> list[_T]:
    """Return the results of `do` for each item in `given`, several at a time. Raises the first failure."""
    some = asyncio.Semaphore(AT_ONCE_MAX)

    async def one(each: _GivenT) -> _T:
        async with some:
            return await do(each)

    async with first_failure() as tasks:
        doing = [tasks.create_task(one(each)) for each in given]
    return [each.result() for each in doing]


def _bytes_of(groups: Iterable[RolloutGroup]) -> int:
    return sum(len(group.tokens) for group in groups)


def _recorded(group: RolloutGroup) -> Recorded:
    record = record_of(group)
    return Recorded(record, digest(record))


def _key_of(records: Sequence[Recorded], holder: str) -> str:
    """Return a key for a push that was sent without one. The key is derived from the push's sender and its records,
    which include their environment."""
    return digest(holder.encode() + b"".join([record.digest for record in records])).hex()


def _own_key(key: str, groups: Iterable[RolloutGroup]) -> str:
    """Return a client's key, made unique to its groups' environments, since other clients may use the same key."""
    environments = sorted({-1 if group.environment is None else group.environment for group in groups})
    return digest(f"{environments} {key}".encode()).hex()


def _queued(group: RolloutGroup, body: BodyRef, holder: str) -> QueuedGroup:
    return QueuedGroup(
        environment=group.environment,
        sequences=group.sequences,
        tokens=group.total_tokens,
        longest=group.longest,
        body=body,
        holder=holder,
    )
