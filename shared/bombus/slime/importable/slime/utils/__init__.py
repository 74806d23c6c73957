"""Names of `slime.utils`."""
