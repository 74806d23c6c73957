"""Sampling for training clients, from the base of a run and from checkpoints of its models.

Samples are not calls: the hive does not train on them. They are on the log only with `record_samples`, as calls without
an episode, and only the client has the answer.
"""
