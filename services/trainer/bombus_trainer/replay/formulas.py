"""The trainer's advantages, as `bombus replay episode` shows them (`bombus.replay.providers`)."""

from collections.abc import Sequence

from bombus.config.job import RunConfig
from bombus.hive.events import BatchEpisode
from bombus.hive.records import CallRecord
from bombus_trainer.data.batch import EpisodeCalls, episode_advantages
from bombus_trainer.settings import TrainerSettings


def call_advantages(group: Sequence[tuple[BatchEpisode, Sequence[CallRecord]]], job: RunConfig) -> list[list[float]]:
    """Return the advantage of each call of each episode of a group, as the job's estimator computes it.

    Raises `ValueError` when an episode does not have one reward for each of its calls, or when the estimator needs
    more than the group.
    """
    settings = TrainerSettings.of_job(job)
    if settings.estimator.over_batch:
        raise ValueError(f"{settings.estimator} normalises over the whole batch: see `bombus replay batch`")
    episodes = [
        EpisodeCalls(member.episode, member.reward, tuple(records), member.call_rewards) for member, records in group
    ]
    return episode_advantages(episodes, settings)
