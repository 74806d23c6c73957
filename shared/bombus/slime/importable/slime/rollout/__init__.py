"""Names of `slime.rollout`."""
