"""Make rollout groups from ended episodes (R16), in runs whose job asks for them (`collection.episode_groups`).

As soon as a task has `num_repeat` ended episodes, the leader reads their calls, stores the group, and reports it. The
core removes the episodes from the pool and queues the group in one event, so a group that is made twice counts once. An
episode that cannot be used is left out of its group.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence

from bombus.bus import Bus, ServerRefused
from bombus.bus.large.parts import Parts
from bombus.config.algorithms import Estimator, named
from bombus.config.job import RunConfig
from bombus.datums.groups import EpisodeSequences, GroupedEpisode, group_of_episodes, sequences_of
from bombus.datums.reading import BusCallReader, ancestors
from bombus.errors import BusUnavailable, LogCorrupted, Refused
from bombus.hive.collection import pick, tasks
from bombus.hive.inbox import EpisodesGrouped
from bombus.hive.records import CallRecord
from bombus.hive.state import Completed, EngineState, Hive
from bombus.hive.trajectories.queue import QueuedGroup
from bombus.hive.trajectories.records import RolloutGroup, encode_group
from bombus.hive.trajectories.training import why_not_trained

log = logging.getLogger(__name__)

PERIOD_S = 0.5
AGAIN_S = 30.0  # delay before a group that the core has not queued is rebuilt


class EpisodeGrouper:
    """Makes groups from the episodes in the pools of a hive."""

    def __init__(self, bus: Bus, hive: Callable[[], Hive]) -> None:
        self._bus = bus
        self._hive = hive
        self._calls = BusCallReader(bus)
        self._parts = Parts(bus, bus.subjects.trajectories_stream)
        self._unreadable: set[str] = set()  # digests of jobs that this release cannot read
        self._made: dict[str, float] = {}  # when each group was last made, by the group's first episode

    async def make(self, now_s: float) -> None:
        """Make all groups that are complete. Raises `BusUnavailable`."""
        self._made = {episode: at_s for episode, at_s in self._made.items() if at_s > now_s - AGAIN_S}
        for engine in list(self._hive().engines.values()):
            if engine.groups_episodes and not self._hive().refusing_groups and (job := self._job(engine)) is not None:
                for episodes in list(_complete(engine)):
                    is_made = episodes[0].episode in self._made
                    if not is_made and not self._hive().why_no_groups(_holder(engine, episodes)):
                        self._made[episodes[0].episode] = now_s
                        await self._make(engine, job, episodes)

    def _job(self, engine: EngineState) -> RunConfig | None:
        """Return the job that an engine runs. If this release cannot read the job, return None, and log the problem
        once."""
        active = engine.active
        assert active is not None, "an engine that groups episodes runs a job"
        try:
            return RunConfig.from_json(active.config)
        except Refused as refusal:
            if active.config_digest not in self._unreadable:
                self._unreadable.add(active.config_digest)
                log.error("cannot group the episodes of engine %s: cannot read its job: %s", engine.name, refusal.why)
            return None

    async def _make(self, engine: EngineState, job: RunConfig, episodes: Sequence[Completed]) -> None:
        """Make a group and report it."""
        run, names = engine.run, tuple(each.episode for each in episodes)
        group, why = await self._group(engine, job, episodes)
        queued = None
        if group is not None:
            record, holder = await asyncio.to_thread(encode_group, group), _holder(engine, episodes)
            if self._hive().why_no_groups(holder, len(record)):
                return
            try:
                body = await self._parts.store(self._bus.subjects.trajectory(engine.name, holder), record)
                queued = QueuedGroup(
                    environment=None,
                    sequences=group.sequences,
                    tokens=group.total_tokens,
                    longest=group.longest,
                    body=body,
                    holder=holder,
                )
            except Refused as refusal:
                why = refusal.why
        if queued is None:
            log.error("the episodes of task %s are dropped: %s", episodes[0].task, why)
        message = EpisodesGrouped(
            id=f"grouped-{secrets.token_hex(16)}", engine=engine.name, run=run, episodes=names, group=queued, why=why
        )
        await self._bus.inbox.send(message)

    async def _group(
        self, engine: EngineState, job: RunConfig, episodes: Sequence[Completed]
    ) -> tuple[RolloutGroup | None, str]:
        """Return a group of all the usable episodes, or the reason why no group can be made."""
        trainer = engine.trajectories.trainer
        tokens_max = trainer.max_token_len if trainer is not None and engine.makes_steps else 0
        played: list[EpisodeSequences] = []
        why = ""
        for each in episodes:
            try:
                given = await self._played(each, job.rollout.trains_auxiliary_calls)
                played.append(await asyncio.to_thread(sequences_of, given))
            except (LogCorrupted, ValueError) as error:
                why = str(error)
                log.error("episode %s of task %s is left out of its group: %s", each.episode, each.task, why)
        if not played:
            return None, why
        estimator = named(Estimator, job.trainer.adv_estimator) or Estimator.GRPO
        try:
            group = await asyncio.to_thread(group_of_episodes, played, estimator, job.trainer.normalise_by_std)
        except ValueError as error:
            return None, str(error)
        why = await asyncio.to_thread(why_not_trained, group, tokens_max) if engine.makes_steps else ""
        return (None, why) if why else (group, "")

    async def _played(self, completed: Completed, trains_auxiliary_calls: bool) -> GroupedEpisode:
        records: Sequence[CallRecord] = await self._calls.records(completed.calls)
        context: Sequence[CallRecord] = await ancestors(self._calls, records)
        if not trains_auxiliary_calls:
            context = (*context, *(record for record in records if record.auxiliary_call))
            records = [record for record in records if not record.auxiliary_call]
        return GroupedEpisode(
            reward=completed.reward, records=records, context=context, call_rewards=completed.call_rewards
        )


def _holder(engine: EngineState, episodes: Sequence[Completed]) -> str:
    """Return the holder whose share a group counts toward: the holder of its first episode."""
    closed = engine.closed.get(episodes[0].episode)
    return "" if closed is None else closed.holder


def _complete(engine: EngineState) -> Iterator[list[Completed]]:
    """Yield the episodes of each task that has enough of them for a group."""
    size = engine.collection.num_repeat
    return (pick(episodes, size) for episodes in tasks(engine) if len(episodes) >= size)


async def run(bus: Bus, hive: Callable[[], Hive], period_s: float = PERIOD_S) -> None:
    """Make groups until cancelled."""
    grouper = EpisodeGrouper(bus, hive)
    while True:
        await asyncio.sleep(period_s)
        try:
            await grouper.make(asyncio.get_running_loop().time())
        except (BusUnavailable, ServerRefused) as error:
            log.warning("ended episodes could not be grouped: %s", error)
