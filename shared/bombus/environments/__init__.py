"""Environments for agents, and the code that runs an agent in one."""
