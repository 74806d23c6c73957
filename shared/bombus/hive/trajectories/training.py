"""How our own trainer trains on a rollout group, and which groups it refuses.

The trainer refuses a group that it would not train on as the environment intended, and names the field that prevents
it.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from bombus.hive.events import TrainerRegistered
from bombus.hive.trajectories.records import RolloutGroup, int_rows

NOT_TRAINED = -100  # the mask of a token that is not trained on; the mask of any other token is the token itself
LOGPROB_MAX = 0.01  # upper limit of a logprob: 0, plus room for rounding
ADVANTAGE_MAX = float.fromhex("0x1.fffffep+127")  # the largest float32
FOLDER, FOLDERS_MAX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}"), 8  # form and number of `checkpoint_dir` folders
ZERO, TEMPERATURE = "set_advantage_to_zero", "temperature"  # the overrides that Atropos's own trainer knows


class Handling(msgspec.Struct, frozen=True):
    """The way in which one sequence of a group is trained on: its temperature, and whether its advantage counts as
    zero."""

    temperature: float = 1.0
    zeroed: bool = False


def why_not_trained(group: RolloutGroup, tokens_max: int = 0) -> str:
    """Return why our trainer does not train on this group, as a sentence for the sender, or "" if it does.

    Sequences may have at most `tokens_max` tokens, or any number if `tokens_max` is 0.
    """
    if tokens_max and group.longest > tokens_max:
        return f"A sequence has {group.longest} tokens, but the run's max_token_len is {tokens_max}: send shorter ones."
    return (
        _why_not_these_fields(group)
        or _why_not_these_overrides(group)
        or _why_not_these_masks(group)
        or _why_not_these_logprobs(group)
        or _why_not_these_advantages(group)
    )


def handling_of(group: RolloutGroup) -> list[Handling]:
    """Return how each sequence is trained on.

    The temperature is taken from the sequence's `overrides`, else from `generation_params`, else from
    `group_overrides`, and is otherwise 1, as in Atropos's example trainer. A temperature of 0 (greedy sampling) defines
    no logprobs and counts as 1, as in calls of episodes. Raises `ValueError` with a sentence for the sender if a field
    cannot be used.
    """
    common = _temperature("group_overrides", _known("group_overrides", _json(group.group_overrides), (TEMPERATURE,)))
    params = _json(group.generation_params)
    sampled = _temperature("generation_params", params if isinstance(params, dict) else {})
    common = common if sampled is None else sampled
    overrides = _json(group.overrides)
    rows = [None] * group.sequences if overrides is None else overrides
    if not isinstance(rows, list) or len(rows) != group.sequences:
        raise ValueError(f"overrides must be a list with one entry for each of {group.sequences} sequences.")
    return [_handling(number, row, 1.0 if common is None else common) for number, row in enumerate(rows)]


def _handling(number: int, row: object, common: float) -> Handling:
    known = _known(f"overrides[{number}]", row, (TEMPERATURE, ZERO))
    own = _temperature(f"overrides[{number}]", known)
    zeroed = known.get(ZERO, False)
    if not isinstance(zeroed, bool):
        raise ValueError(f"overrides[{number}].{ZERO} must be true or false, not {zeroed!r}.")
    return Handling(temperature=common if own is None else own, zeroed=zeroed)


def _json(text: bytes) -> Any:
    return msgspec.json.decode(text) if text else None


def _known(where: str, given: object, names: Sequence[str]) -> dict[str, Any]:
    """Return the overrides in an object. Raises `ValueError` if it contains one that this trainer does not know."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f"{where} must be an object or null.")
    for name, value in given.items():
        if name not in names and value is not None:
            known = " and ".join(names)
            raise ValueError(
                f"{where}.{name} is not known to this run's own trainer, which knows {known}: leave it out."
            )
    return given


def _temperature(where: str, given: dict[str, Any]) -> float | None:
    value = given.get(TEMPERATURE)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
        raise ValueError(f"{where}.{TEMPERATURE} must be a number from 0 to 100, not {value!r}.")
    return float(value) or 1.0


# ---- why a trainer cannot be registered --------------------------------------------------------------------------


def why_not_registered(event: TrainerRegistered, begun: int) -> str:
    """Return why our own trainer cannot use these settings in a run that begins at step `begun`, or "" if it can."""
    if event.max_token_len < 1:
        return f"max_token_len is {event.max_token_len}, but it must be at least 1: it limits the tokens of a sequence."
    if event.starting_step != begun:
        return (
            f"starting_step is {event.starting_step}, but this engine's own trainer begins at step {begun}: send that. "
            "The job's trainer.resume decides where it begins."
        )
    if event.num_steps <= begun:
        return (
            f"num_steps is {event.num_steps}, but it must be above {begun}: it is the run's last step, and the run "
            f"begins at step {begun}."
        )
    parts = event.checkpoint_dir.removeprefix("./").rstrip("/").split("/") if event.checkpoint_dir else []
    if len(parts) > FOLDERS_MAX or not all(FOLDER.fullmatch(part) for part in parts):
        return (
            f"checkpoint_dir is {event.checkpoint_dir!r}, but this engine's own trainer keeps checkpoints in its "
            "own folder. Send a relative path of letters, digits, dots, dashes and underscores, or an empty one."
        )
    return ""


def checkpoint_folder(event: TrainerRegistered | None) -> str:
    """Return the subfolder of the run's checkpoints that its trainer registered, or "" if there is none."""
    return "" if event is None else event.checkpoint_dir.removeprefix("./").rstrip("/")


# ---- why a group is not trained ----------------------------------------------------------------------------------


def _why_not_these_fields(group: RolloutGroup) -> str:
    given = {
        "ref_logprobs": group.ref_logprobs is not None,
        "distill_token_ids": group.distill_token_ids is not None,
        "distill_logprobs": group.distill_logprobs is not None,
        "images": _holds_something(_json(group.images)),
    }
    for name, is_given in given.items():
        if is_given:
            why = "it computes its own (trainer.kl_coef)" if name == "ref_logprobs" else "it cannot train on them"
            return f"{name} is not accepted by this run's own trainer: {why}. Send null."
    return ""


def _holds_something(value: object) -> bool:
    return any(map(_holds_something, value)) if isinstance(value, list) else value is not None


def _why_not_these_overrides(group: RolloutGroup) -> str:
    try:
        handling_of(group)
    except ValueError as why:
        return str(why)
    return ""


def _why_not_these_masks(group: RolloutGroup) -> str:
    lengths = group.sequence_lengths()
    rows = zip(int_rows(group.tokens, lengths), int_rows(group.masks, lengths), strict=True)
    for number, (tokens, masks) in enumerate(rows):
        for place, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
            if mask not in (NOT_TRAINED, token):
                return (
                    f"masks[{number}][{place}] is {mask}: a mask must be {NOT_TRAINED} if the token is not trained on, "
                    f"and the token itself ({token}) if it is."
                )
    return ""


def _why_not_these_logprobs(group: RolloutGroup) -> str:
    if group.inference_logprobs is None:
        return ""
    lengths = group.sequence_lengths()
    rows = zip(group.inference_logprobs.rows(lengths), int_rows(group.masks, lengths), strict=True)
    for number, (logprobs, masks) in enumerate(rows):
        for place, (logprob, mask) in enumerate(zip(logprobs, masks, strict=True)):
            if mask != NOT_TRAINED and logprob > LOGPROB_MAX:
                return (
                    f"inference_logprobs[{number}][{place}] is {logprob}, at a token that is trained on: a logprob "
                    "cannot be above 0. Send the sampler's logprobs, or null for the whole group."
                )
    return ""


def _why_not_these_advantages(group: RolloutGroup) -> str:
    if group.advantages is None:
        return ""
    lengths = group.sequence_lengths()
    given = group.advantage_rows()
    if given != lengths:
        number = next((n for n, (a, b) in enumerate(zip(given, lengths, strict=False)) if a != b), len(lengths))
        return f"advantages[{number}] does not have one number for each token of its sequence."
    for number, row in enumerate(group.advantages.rows(lengths)):
        if not all(math.isfinite(each) and abs(each) <= ADVANTAGE_MAX for each in row):
            return f"advantages[{number}] has a number that does not fit into float32."
    return ""
