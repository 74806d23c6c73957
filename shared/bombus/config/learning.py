"""Settings that are each valid and together train nothing: they are refused before any episode is paid for."""

from bombus.config.algorithms import Correction, Estimator, named
from bombus.config.job import RunConfig
from bombus.hive.collection import BATCH_METHODS

MASKS = (Correction.ICEPOP, Correction.TOKEN_MASK, Correction.SEQUENCE_MASK)


def why_nothing_is_learnt(job: RunConfig) -> tuple[str, str]:
    """Return the path of a setting with which this job learns nothing, and why with what to do; ("", "") if none.

    Rollout groups of others are trained whatever the job says of episodes.
    """
    trainer, rollout = job.trainer, job.rollout
    if trainer.correction in MASKS and trainer.tis_clip > 0.0 and not trainer.tis_clip_low <= 1.0 <= trainer.tis_clip:
        return "trainer.tis_clip", (
            f"correction {trainer.correction} leaves out every token whose importance weight is below tis_clip_low or "
            "above tis_clip, and where sampler and trainer agree it is 1: choose bounds around 1"
        )
    if job.collection.rollout_groups or job.collection.episode_groups:
        return "", ""
    if rollout.temperature == 0.0 and rollout.sampling != "obey":
        return "rollout.temperature", (
            "the most likely tokens are not drawn from the policy, so they are never learned: set it above 0, or "
            "bombus.rollout.sampling to obey, where requests choose"
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
            "to 2 or "
            "more, or choose another method"
        )
    if not compares or pulls:
        return "", ""
    return "rollout.num_repeat", (
        f"adv_estimator {estimator} compares the episodes of a task with each other, and a single one has an "
        "advantage of "
        "0: set it to 2 or more (4 is the default), or choose adv_estimator reinforce_plus_plus, which compares batches"
    )
