"""Turns the files that a task's tests leave into a reward."""

import os
import stat
from pathlib import Path

import msgspec

from bombus.hive.episodes import REWARD_MAX
from bombus.rollout.reward import Judgement, check_signal, is_reward
from bombus.sdk.errors import InfraError

TEXT, OBJECT = "reward.txt", "reward.json"
BYTES_MAX = 64 << 10


def verdict_of(exit_code: int, verifier: Path, errors: str) -> Judgement:
    """Return the reward in `reward.json`, or else the reward in `reward.txt`, whatever the exit code.

    If `reward.json` has several rewards, the one called `reward` counts or, if none has that name, their mean.

    Raises `InfraError` if the tests did not judge, because a signal ended them or they left no valid number.
    """
    check_signal(exit_code)
    lines = errors.strip().splitlines()
    said = lines[-1] if lines else ""
    parts: dict[str, float] = {}
    try:
        if (text := _read(verifier / OBJECT)) is not None:
            parts = _of_object(text)
            reward = parts["reward"] if "reward" in parts else sum(parts.values()) / len(parts)
        elif (text := _read(verifier / TEXT)) is not None:
            reward = _number(_text_number(text), text, TEXT)
        else:
            raise InfraError(f"the tests ended with exit code {exit_code} and wrote neither {TEXT} nor {OBJECT}")
    except InfraError as error:
        raise InfraError(f"{error}: {said}" if said else str(error)) from error
    return Judgement(reward, said if exit_code and not reward else "", parts)


def _read(path: Path) -> str | None:
    """Return a file's text, or None if it does not exist. Programs that the tests ran may have put anything there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InfraError(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InfraError(f"{path.name} is not a file")
        data = os.read(descriptor, BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    if len(data) > BYTES_MAX:
        raise InfraError(f"{path.name} has over {BYTES_MAX} bytes")
    return data.decode(errors="replace")


def _of_object(text: str) -> dict[str, float]:
    """Return the rewards by name. Raises `InfraError` unless all of them are numbers, as Harbor requires."""
    try:
        found = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InfraError(f"{OBJECT} is not a JSON object that maps names to rewards: {error}") from error
    if not found:
        raise InfraError(f"{OBJECT} has no reward in it")
    return {name: _number(value, value, OBJECT) for name, value in found.items()}


def _text_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _number(value: object, shown: object, name: str) -> float:
    if not isinstance(value, int | float) or not is_reward(value):
        raise InfraError(
            f"{name} has {str(shown).strip()[:80]!r}, but a reward must be a number of at most {REWARD_MAX:.0e}"
        )
    return float(value)
