"""The wire formats of Tinker's SDK and xorl-client, whose users write their own training loops.

Requests are read as operations, and results are written as answers. The code is pure: no bus, no routes, no clock.
"""
