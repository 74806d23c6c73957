"""Names of `slime.rollout.filter_hub`."""
