"""Tests of the API of rollout groups, on a real bus."""
