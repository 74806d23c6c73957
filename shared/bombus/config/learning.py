"""Checks, before any episode is played, for combinations of individually valid settings with which nothing is
learnt."""

from bombus.config.algorithms import Correction, Estimator, named
from bombus.config.job import RunConfig
from bombus.hive.collection import BATCH_METHODS

MASKS = (Correction.ICEPOP, Correction.TOKEN_MASK, Correction.SEQUENCE_MASK)


def why_nothing_is_learnt(job: RunConfig) -> tuple[str, str]:
    """Return the path of a setting with which this job learns nothing, and a sentence with the reason and the remedy.

    Returns ("", "") if there is no such setting. If batches consist of rollout groups, episode settings are not
    checked.
    """
    trainer, rollout = job.trainer, job.rollout
    if trainer.correction in MASKS and trainer.tis_clip > 0.0 and not trainer.tis_clip_low <= 1.0 <= trainer.tis_clip:
        return "trainer.tis_clip", (
            f"correction {trainer.correction} leaves out every token whose importance weight is below tis_clip_low or "
            "above tis_clip, but the weight is 1 if sampler and trainer agree: choose bounds around 1"
        )
    if job.collection.rollout_groups or job.collection.episode_groups:
        return "", ""
    if rollout.temperature == 0.0 and rollout.sampling != "obey":
        return "rollout.temperature", (
            "at temperature 0 the most likely tokens are not samples of the policy, so nothing is learned from them: "
            "set it above 0, or set bombus.rollout.sampling to obey, so that requests choose"
        )
    return _why_a_group_of_one_teaches_nothing(job)


def _why_a_group_of_one_teaches_nothing(job: RunConfig) -> tuple[str, str]:
    method, estimator = BATCH_METHODS[job.collection.method], job.trainer.adv_estimator
    if job.rollout.num_repeat > 1 or not method.counts_tasks:
        return "", ""
    compares = named(Estimator, estimator) is not Estimator.REINFORCE_PLUS_PLUS
    pulls = job.trainer.kl_coef > 0.0 or job.trainer.entropy_coef > 0.0
    if method.needs_signal:
        return "rollout.num_repeat", (
            f"a group of one has no rewards that differ, so {job.collection.method} never completes a batch: set it "
            "to 2 or more, or choose another method"
        )
    if not compares or pulls:
        return "", ""
    return "rollout.num_repeat", (
        f"adv_estimator {estimator} compares the episodes of a task with each other, so a single one has an advantage "
        "of 0: set it to 2 or more (4 is the default), or choose adv_estimator reinforce_plus_plus, which compares "
        "over the whole batch"
    )
