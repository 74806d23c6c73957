"""Episodes one of whose calls was cut at a limit of the job: what their rewards lose.

DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.4. Its overlong filtering is the setting `mask` (see `batch`).
"""

from bombus.config.algorithms import Overlong
from bombus.hive.records import CallRecord
from bombus_trainer.settings import TrainerSettings


def was_cut(records: tuple[CallRecord, ...], settings: TrainerSettings) -> bool:
    """Whether one of an episode's calls was cut at a limit of the job, see `CallRecord.was_cut`."""
    limits = settings.job.rollout
    return any(record.was_cut(limits.max_response_length_in_one_turn, limits.max_model_len) for record in records)


def soft_penalty(record: CallRecord, settings: TrainerSettings) -> float:
    """DAPO's soft overlong punishment of a call, 0 to -1: equation 13.

    0 up to the limit of a turn less the buffer, in sampled tokens, then linear, and -1 at the limit, or when there was
    no more room in the model. Of several choices the longest counts.
    """
    if was_cut((record,), settings):
        return -1.0
    limit, buffer = settings.job.rollout.max_response_length_in_one_turn, settings.config.overlong_buffer
    longest = max((len(choice.tokens) // 4 for choice in record.choices), default=0)
    return -min(max(longest - (limit - buffer), 0) / buffer, 1.0)


def penalties(records: tuple[CallRecord, ...], settings: TrainerSettings) -> list[float]:
    """What is added to each call's reward. An episode's own reward takes the worst of them."""
    if settings.config.overlong != Overlong.PENALTY:
        return [0.0] * len(records)
    return [settings.config.overlong_penalty * soft_penalty(record, settings) for record in records]
