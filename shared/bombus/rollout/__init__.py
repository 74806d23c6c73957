"""`bombus rollout` and `bombus start`: any command plays episodes, each in a copy of a workspace."""
