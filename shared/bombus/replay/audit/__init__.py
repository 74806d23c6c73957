"""Audit: accounts for every sampled token, rollout group and training operation on a log. Pure."""
