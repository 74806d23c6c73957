"""Episodes one of whose calls was cut at its length: what their rewards lose.

DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.4. Its overlong filtering is the setting `mask` (see `batch`).
"""

from bombus.algorithms import Overlong
from bombus.records import CallRecord, FinishReason
from bombus_trainer.settings import TrainerSettings


def was_cut(record: CallRecord) -> bool:
    return any(choice.finish == FinishReason.LENGTH for choice in record.choices)


def soft_penalty(record: CallRecord, turn_tokens_max: int, buffer: int) -> float:
    """DAPO's soft overlong punishment of a call, 0 to -1: equation 13.

    0 up to `turn_tokens_max` - `buffer` sampled tokens, then linear, and -1 at `turn_tokens_max` or when the call was
    cut, at whatever length. Of several choices the longest counts.
    """
    if was_cut(record):
        return -1.0
    longest = max((len(choice.tokens) // 4 for choice in record.choices), default=0)
    return -min(max(longest - (turn_tokens_max - buffer), 0) / buffer, 1.0)


def penalties(records: tuple[CallRecord, ...], settings: TrainerSettings) -> list[float]:
    """What is added to each call's reward. An episode's own reward takes the worst of them."""
    if settings.overlong != Overlong.PENALTY:
        return [0.0] * len(records)
    scale, room, buffer = settings.overlong_penalty, settings.turn_tokens_max, settings.overlong_buffer
    return [scale * soft_penalty(record, room, buffer) for record in records]
