"""`bombus rollout` and `bombus start`: have any command play episodes, each in a copy of a workspace."""
