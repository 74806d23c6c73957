"""The leader makes scored groups of ended episodes."""

import logging

import pytest

from bombus.bus import Bus
from bombus.hive import inbox
from bombus.hive.events import Collection
from bombus_coordinator.grouping import EpisodeGrouper
from tests.coordinator.core_in_memory import ENGINE
from tests.coordinator.scored_in_memory import ScoredHarness
from tests.coordinator.test_trained_trajectories import TrainedHarness


class GroupedHarness(TrainedHarness):
    """A core that makes groups of two episodes, with a job as it is on the log."""

    def __init__(self, config: str) -> None:
        ScoredHarness.__init__(self)
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
    assert "no groups are made of the episodes of engine" in told[0]
    assert len(hive.engine.pool) == 2  # they wait for a leader that can read it
