"""The trainer's advantages, as shown by `bombus replay episode` (`bombus.replay.providers`)."""

from collections.abc import Sequence

from bombus.config.job import RunConfig
from bombus.hive.events import BatchEpisode
from bombus.hive.records import CallRecord
from bombus_trainer.data.batch import EpisodeCalls, episode_advantages
from bombus_trainer.settings import TrainerSettings


def call_advantages(group: Sequence[tuple[BatchEpisode, Sequence[CallRecord]]], job: RunConfig) -> list[list[float]]:
    """Return the advantage of each call in each of a group's episodes, as the job's estimator computes it.

    It is 0 for auxiliary calls that the job does not train on.

    Raises `ValueError` if an episode does not have one reward for each of its calls, or if the estimator needs more
    data than the group has.
    """
    settings = TrainerSettings.of_job(job)
    if settings.verl_adv_estimator:
        raise ValueError(f"{settings.verl_adv_estimator} is verl's estimator, computed only in verl's environment")
    if settings.estimator.over_batch:
        raise ValueError(f"{settings.estimator} normalizes over the whole batch: see `bombus replay batch`")
    episodes = [
        EpisodeCalls(member.episode, member.reward, tuple(records), member.call_rewards) for member, records in group
    ]
    if job.rollout.trains_auxiliary_calls:
        return episode_advantages(episodes, settings)
    trained = episode_advantages([episode.without_auxiliary_calls() for episode in episodes], settings)
    return [_with_auxiliary_calls(episode.records, found) for episode, found in zip(episodes, trained, strict=True)]


def _with_auxiliary_calls(records: Sequence[CallRecord], advantages: Sequence[float]) -> list[float]:
    """Return an advantage for each record: the given ones, in order, and 0 for auxiliary calls."""
    left = iter(advantages)
    return [0.0 if record.auxiliary_call else next(left) for record in records]
