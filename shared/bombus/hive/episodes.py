"""Episodes: the two forms of an id, its name on the log and what its claim returns with a secret; keys and rewards."""

from typing import Any

KEY_PREFIX = "sk-bombus-"  # an episode's key begins with it
SECRET_MARK = "."  # between the name and the secret; neither contains it
REWARD_MAX = 1e9  # in size: squares of gradients stay far within float32
METADATA_BYTES_MAX = 64 << 10  # of the metadata and the metrics of an episode together


def without_secret(claimed_id: str) -> str:
    """Return the name of an episode on the log, for an id with or without the secret of its claim."""
    return claimed_id.partition(SECRET_MARK)[0]


NUMBER_FORMS = "a number (int, float or bool, also of NumPy or torch, and an array of one element)"
SHOWN_CHARACTERS = 100


def reward_number(value: object) -> float:
    """Return a reward as a number, whatever its source. Raises `ValueError` for what is none, such as a text.

    It may be infinite, NaN, or larger than the hive takes.
    """
    try:
        # An array of several elements raises, and one of a single element is the number in it.
        found: Any = value.item() if hasattr(value, "item") else value
        if hasattr(type(found), "__float__"):
            return float(found)
    except Exception:  # the code of somebody's class
        pass
    raise ValueError(f"a reward is {NUMBER_FORMS}, and not {_shown(value)}")


def reward_forms_of(value: object) -> float | list[float] | dict[str, float] | None:
    """Return the reward of an episode: a number, or one for each call, in order or by its id. Raises `ValueError`."""
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
        raise ValueError(f"{error}; one for each call is a list, or a dict by the calls' ids") from error


def _shown(value: object) -> str:
    try:
        return f"{type(value).__name__} {repr(value)[:SHOWN_CHARACTERS]}"
    except Exception:  # the code of somebody's class: its kind is enough
        return type(value).__name__
