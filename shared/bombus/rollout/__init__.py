"""`bombus rollout` and `bombus start`: let any command play episodes, each in a copy of a workspace."""
