"""The wire format of Atropos's trajectory API: environments push rollout groups, and trainers fetch batches of them.

The code is pure: no bus, no routes, no clock.
"""
