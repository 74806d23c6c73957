"""The leader makes rollout groups of ended episodes: their calls are read from a real stream."""

import logging
from contextlib import suppress

import msgspec
import pytest

from bombus.bus import Bus
from bombus.bus.large.parts import Parts
from bombus.errors import BusUnavailable
from bombus.hive import inbox
from bombus.hive.events import Collection, NotedCall
from bombus.hive.inbox import EpisodesGrouped
from bombus.hive.records import CallRecord, CallRef, digest, encode_record
from bombus.hive.trajectories.records import RolloutGroup, decode_group, int_rows
from bombus_coordinator.grouping import AGAIN_S, EpisodeGrouper
from tests.coordinator.core_in_memory import ENGINE
from tests.coordinator.groups_in_memory import GroupHarness
from tests.coordinator.test_trained_trajectories import TrainedHarness
from tests.trainer.small_batches import call


async def play(bus: Bus, harness: TrainedHarness, reward: float, *records: CallRecord) -> str:
    """Play an episode of task t1 whose calls are on the bus. Its calls follow each other."""
    (episode,) = harness.claim()
    parent: CallRef | None = None
    for record in records:
        body = encode_record(msgspec.structs.replace(record, parent=parent, episode=episode))
        ack = await bus.publisher.publish(bus.subjects.call(ENGINE, ""), body, msg_id=record.id)
        parent = CallRef(ack.seq, record.id, digest(body))
        noted = NotedCall(episode, parent, 2, 1, 0, 0)
        harness.send(inbox.CallRecorded(id=record.id, engine=ENGINE, run=harness.engine.run, call=noted))
    harness.end(episode, "t1", reward)
    return episode


async def make(bus: Bus, harness: TrainedHarness) -> None:
    await EpisodeGrouper(bus, lambda: harness.core.hive).make(0.0)


async def made(bus: Bus, number: int = 1) -> EpisodesGrouped:
    """Return the message of this number that the leader has sent."""
    (stored,) = await bus.get_many(bus.subjects.inbox_stream, [number])
    message = inbox.decode_message(stored.data)
    assert isinstance(message, EpisodesGrouped)
    return message


async def group_in(bus: Bus, message: EpisodesGrouped) -> RolloutGroup:
    assert message.group is not None
    assert message.group.body is not None
    return decode_group(await Parts(bus, bus.subjects.trajectories_stream).fetch(message.group.body))


async def fill(bus: Bus) -> None:
    """Fill the stream of rollout groups."""
    parts = Parts(bus, bus.subjects.trajectories_stream)
    for size in (32 << 20, 1 << 20, 64 << 10, 4 << 10, 100):
        with suppress(BusUnavailable):
            while True:
                await parts.store(bus.subjects.trajectory(ENGINE, ""), bytes(size))


def rolling(**registered: object) -> TrainedHarness:
    harness = TrainedHarness(episode_groups=True, num_repeat=2)
    harness.roll(**registered)
    return harness


def two_temperatures(name: str) -> tuple[CallRecord, CallRecord]:
    first = call(name, [1], [2], temperature=0.5)
    return first, call(name * 2, [3], [4], parent=first)


async def test_an_episode_that_cannot_be_in_a_group_does_not_take_the_others_with_it(bus: Bus) -> None:
    harness = rolling()
    episodes = (
        await play(bus, harness, 1.0, *two_temperatures("a")),
        await play(bus, harness, 0.25, call("b", [1, 2], [3])),
    )
    await make(bus, harness)
    message = await made(bus)
    group = await group_in(bus, message)
    assert int_rows(group.tokens, group.sequence_lengths()) == [[1, 2, 3]]
    assert group.scores.rows([1]) == [[0.25]]
    assert message.episodes == episodes, "both leave the pool"
    harness.send(message)
    assert not harness.engine.pool
    assert len(harness.trajectories.queue.groups) == 1


async def test_where_no_episode_can_be_in_a_group_all_are_dropped_with_the_reason(bus: Bus) -> None:
    harness = rolling()
    for name in ("a", "b"):
        await play(bus, harness, 1.0, *two_temperatures(name))
    await make(bus, harness)
    message = await made(bus)
    assert message.group is None
    assert message.why == "calls of one conversation were sampled at 2 temperatures"


async def test_a_group_that_was_not_queued_is_made_again_after_a_while(bus: Bus) -> None:
    harness = rolling()
    for name in ("a", "b"):
        await play(bus, harness, 1.0, call(name, [1, 2], [3]))
    grouper = EpisodeGrouper(bus, lambda: harness.core.hive)
    await grouper.make(0.0)
    await grouper.make(AGAIN_S - 1)
    assert (await bus.state(bus.subjects.inbox_stream)).last_seq == 1, "it may still be decided"
    await grouper.make(AGAIN_S)
    assert (await made(bus, 2)).episodes == (await made(bus, 1)).episodes


async def test_a_group_that_could_not_be_stored_is_not_computed_again_at_once(bus: Bus) -> None:
    harness = rolling()
    for name in ("a", "b"):
        await play(bus, harness, 1.0, call(name, [1, 2], [3]))
    await fill(bus)
    grouper = EpisodeGrouper(bus, lambda: harness.core.hive)
    with pytest.raises(BusUnavailable):
        await grouper.make(0.0)
    await grouper.make(0.5)
    with pytest.raises(BusUnavailable):
        await grouper.make(AGAIN_S)


async def test_a_group_with_a_sequence_that_is_too_long_for_our_trainer_is_dropped(bus: Bus) -> None:
    for longest, is_made in ((3, True), (2, False)):
        harness = rolling(max_token_len=longest)
        for name in ("a", "b"):
            await play(bus, harness, 1.0, call(f"{name}{longest}", [1, 2], [3]))
        await make(bus, harness)
        message = await made(bus, 4 - longest)
        assert (message.group is not None) == is_made, message.why


async def test_what_follows_an_auxiliary_call_is_learnt_and_the_auxiliary_call_is_not(bus: Bus) -> None:
    harness = rolling()
    for name in ("a", "b"):
        first = call(name, [1], [2], auxiliary_call="judge")
        await play(bus, harness, 1.0, first, call(name * 2, [3], [4], parent=first))
    await make(bus, harness)
    group = await group_in(bus, await made(bus))
    assert int_rows(group.tokens, group.sequence_lengths()) == [[1, 2, 3, 4]] * 2
    assert int_rows(group.masks, group.sequence_lengths()) == [[-100, -100, -100, 4]] * 2


class GroupedHarness(TrainedHarness):
    """A core that makes groups of two episodes, with a job as it is on the log."""

    def __init__(self, config: str) -> None:
        GroupHarness.__init__(self)
        rules = Collection(episode_groups=True, num_repeat=2)
        job = inbox.Configure(
            id=self.id(), engine=ENGINE, config=config, config_digest="d", collection=rules, model="tiny"
        )
        self.request(job)


async def test_a_job_that_this_release_cannot_read_ends_nobody_and_is_told_once(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    hive = GroupedHarness('{"of_another_release": 1}')
    hive.roll()
    hive.play("t1")
    hive.play("t1")
    grouper = EpisodeGrouper(bus, lambda: hive.core.hive)
    with caplog.at_level(logging.ERROR):
        await grouper.make(1.0)
        await grouper.make(2.0)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "cannot group the episodes of engine" in told[0]
    assert len(hive.engine.pool) == 2  # they wait for a leader that can read it
