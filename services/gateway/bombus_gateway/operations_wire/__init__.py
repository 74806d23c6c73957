"""The wire of clients that write their own training loop: Tinker's SDK and xorl-client, read and written as operations.

It is pure: no bus, no routes, no clock.
"""
