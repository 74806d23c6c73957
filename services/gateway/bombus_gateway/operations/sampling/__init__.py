"""Sampling for training clients, from the base of a run and from checkpoints of its models.

Samples are not calls: nobody trains on them, so nothing of them is on the log. Who asked holds what it was answered.
"""
