"""Ways to build it wrong. Each is a mistake that the simulator has to find: `test_sim.py` holds it to that."""

from enum import StrEnum


class Variant(StrEnum):
    NO_EPOCH_FENCE = "an append of several decisions is fenced by expected sequences alone"
    REPLY_EARLY = "an answer is sent before its decision is stored"
    START_LATE = "a new leader goes on behind the end of the inbox instead of behind what the last event answers"
    START_EARLY = "a new leader decides again what the last event answers"
    PURGE_EARLY = "the inbox is trimmed below what was read, not below what has landed"
    CALLS_PURGED = "calls are purged below the newest one that was noted"
    SNAPSHOT_EARLY = "a snapshot is taken while an append is in flight"
    OLD_TRAINER = "a step.done of a superseded trainer epoch is accepted"
    TOLD_EARLY = "a call is acknowledged before the coordinator was told of it"
    UNSAVED_STEP = "a step is published before its checkpoint is durable"
    TRAINED_ON = "a trainer goes on from what a failed attempt left in memory"
    SWEPT_ALL = "a trainer removes every checkpoint that its own fold does not name"
