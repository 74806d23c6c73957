"""The wire of Atropos's trajectory API: environments push scored groups, and trainers take batches of them.

It is pure: no bus, no routes, no clock.
"""
