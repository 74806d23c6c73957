"""Names of `slime.rollout.rm_hub.math_dapo_utils`."""

from bombus.slime.rewards import score_of_box as compute_score

__all__ = ["compute_score"]
