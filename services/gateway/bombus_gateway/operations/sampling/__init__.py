"""Sampling for training clients, from the base of a run and from checkpoints of its models.

Samples are not calls: the hive does not train on them, so they are not on the log. Only the client has the answer.
"""
