"""The wire of Atropos's trajectory API: environments push rollout groups, and trainers take batches of them.

It is pure: no bus, no routes, no clock.
"""
