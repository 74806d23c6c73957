"""Deliberate mistakes in the implementation, each of which the simulator has to find (`test_sim.py`)."""

from enum import StrEnum


class Variant(StrEnum):
    NO_EPOCH_FENCE = "an append of several decisions is fenced by expected sequences alone"
    REPLY_EARLY = "an answer is sent before its decision is stored"
    START_LATE = (
        "a new leader continues after the end of the inbox instead of after the message that the last event answers"
    )
    WENT_ON = "a new leader goes on at the sequence that the last event answers, whatever the inbox has lost"
    START_EARLY = "a new leader decides the message that the last event answers again"
    PURGE_EARLY = "the inbox is trimmed up to what was read, not up to what is stored"
    CALLS_PURGED = "calls are purged up to the one noted last"
    STEPS_PURGED = "calls are kept for the newest two steps alone, not for those that the older checkpoint lacks"
    OPS_PURGED = "training operations are purged up to the end of their stream"
    GROUPS_PURGED = "rollout groups are purged up to the end of their stream"
    SENT_EARLY = "a batch is said to be delivered before its last byte has left"
    OLD_EXECUTOR = "an operation.done of a superseded trainer epoch is accepted"
    ENDED_APART = "the events of a decision about several engines are stored one by one"
    SNAPSHOT_EARLY = "a snapshot is taken while an append is in flight"
    OLD_TRAINER = "a step.done of a superseded trainer epoch is accepted"
    TOLD_EARLY = "a call is acknowledged before it was reported to the coordinator"
    UNSAVED_STEP = "a step is published before its checkpoint is durable"
    TRAINED_ON = "a trainer continues from what a failed attempt left in memory"
    GAVE_UP = "a replica that cannot load waits for newer weights"
    SWEPT_ALL = "a trainer removes every checkpoint that its own fold does not name"
