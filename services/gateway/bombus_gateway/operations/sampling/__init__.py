"""Sampling for training clients, from the base of a run and from checkpoints of its models.

Samples are not calls: the hive does not train on them, and only the client has the answer. With `record_samples`, they
are also recorded in the log, as calls without an episode.
"""
