"""Episode ids, keys and rewards.

The log has only an episode's name. A claim returns an id, which consists of the name and a secret.
"""

from typing import Any

KEY_PREFIX = "sk-bombus-"  # the beginning of an episode's key
SECRET_MARK = "."  # separates the name from the secret; neither contains it
REWARD_MAX = 1e9  # limit on the absolute value, which keeps squares of gradients far within float32
METADATA_BYTES_MAX = 64 << 10  # limit on the total size of an episode's metadata and metrics


def without_secret(claimed_id: str) -> str:
    """Return an episode's name on the log, given its id with or without the secret."""
    return claimed_id.partition(SECRET_MARK)[0]


NUMBER_FORMS = "a number (int, float or bool, also of NumPy or torch, and an array of one element)"
SHOWN_CHARACTERS = 100


def reward_number(value: object) -> float:
    """Convert a reward to a float. Raises `ValueError` if it is not a number; strings do not count as numbers.

    The result may be infinite, NaN, or larger than the hive accepts.
    """
    try:
        # `item` raises for an array of several elements, and returns the number in an array of one.
        found: Any = value.item() if hasattr(value, "item") else value
        if hasattr(type(found), "__float__"):
            return float(found)
    except Exception:  # raised by the methods of the caller's class
        pass
    raise ValueError(f"a reward must be {NUMBER_FORMS}, not {_shown(value)}")


def reward_forms_of(value: object) -> float | list[float] | dict[str, float] | None:
    """Convert an episode's reward: one number, or one for each call, in order or by call id. Raises `ValueError` if it
    is neither."""
    match value:
        case None:
            return None
        case dict():
            return {str(call): reward_number(each) for call, each in value.items()}
        case list() | tuple():
            return [reward_number(each) for each in value]
    try:
        return reward_number(value)
    except ValueError as error:
        if hasattr(value, "tolist") and isinstance(several := value.tolist(), list):
            return [reward_number(each) for each in several]
        raise ValueError(f"{error}; to reward each call, give a list, or a dict with the calls' ids as keys") from error


def _shown(value: object) -> str:
    try:
        return f"{type(value).__name__} {repr(value)[:SHOWN_CHARACTERS]}"
    except Exception:  # raised by `__repr__` of the caller's class: show only its type
        return type(value).__name__
