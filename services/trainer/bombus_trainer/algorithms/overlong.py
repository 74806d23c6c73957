"""Penalties for episodes in which a call was cut off by one of the job's limits.

They are from DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.4. DAPO's overlong filtering is the setting `mask`.
"""

from typing import assert_never

from bombus.config.algorithms import Overlong
from bombus.hive.records import CallRecord, FinishReason
from bombus_trainer.settings import TrainerSettings


def was_cut(records: tuple[CallRecord, ...], settings: TrainerSettings) -> bool:
    """Return whether any of an episode's calls was cut off by one of the job's limits; see `CallRecord.was_cut`."""
    limits = settings.job.rollout
    return any(record.was_cut(limits.max_response_length_in_one_turn, limits.max_model_len) for record in records)


def was_ended_by_length(records: tuple[CallRecord, ...]) -> bool:
    """Return whether any of an episode's calls was cut off by any length limit, including the request's own."""
    return any(choice.finish == FinishReason.LENGTH for record in records for choice in record.choices)


def is_masked(records: tuple[CallRecord, ...], settings: TrainerSettings) -> bool:
    """Return whether an episode is left out of the loss. `bombus.replay.episode.tree` applies the same rule."""
    match settings.config.overlong:
        case Overlong.MASK:
            return was_cut(records, settings)
        case Overlong.KEEP | Overlong.PENALTY:
            return False
        case _:
            assert_never(settings.config.overlong)


def soft_penalty(record: CallRecord, settings: TrainerSettings) -> float:
    """Compute DAPO's soft overlong punishment of a call, from 0 to -1: equation 13.

    It is 0 up to the turn's limit minus the buffer, in sampled tokens, then falls linearly to -1 at the limit. It is
    also -1 if the model's context was exhausted. If there are several choices, the longest counts.
    """
    if was_cut((record,), settings):
        return -1.0
    limit, buffer = settings.job.rollout.max_response_length_in_one_turn, settings.config.overlong_buffer
    longest = max((len(choice.tokens) // 4 for choice in record.choices), default=0)
    return -min(max(longest - (limit - buffer), 0) / buffer, 1.0)


def penalties(records: tuple[CallRecord, ...], settings: TrainerSettings) -> list[float]:
    """Return the penalty for each call, to add to the call's reward; the worst penalty is added to the episode's
    reward."""
    match settings.config.overlong:
        case Overlong.PENALTY:
            return [settings.config.overlong_penalty * soft_penalty(record, settings) for record in records]
        case Overlong.KEEP | Overlong.MASK:
            return [0.0] * len(records)
        case _:
            assert_never(settings.config.overlong)
