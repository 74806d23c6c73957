"""How the files that a task's tests leave become a reward."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from bombus.hive.episodes import REWARD_MAX
from bombus.rollout.reward import Judgement, check_signal, is_reward
from bombus.sdk.errors import InfraError

TEXT, OBJECT = "reward.txt", "reward.json"
BYTES_MAX = 64 << 10


def verdict_of(exit_code: int, verifier: Path, errors: str) -> Judgement:
    """Return the reward in `reward.json`, or else the one in `reward.txt`: the exit code does not count.

    Raises `InfraError` when the tests did not judge: a signal ended them, or there is no number.
    """
    check_signal(exit_code)
    lines = errors.strip().splitlines()
    said = lines[-1] if lines else ""
    try:
        if (text := _read(verifier / OBJECT)) is not None:
            reward = _of_object(text)
        elif (text := _read(verifier / TEXT)) is not None:
            reward = _number(text, TEXT)
        else:
            raise InfraError(f"the tests ended with exit code {exit_code} and wrote neither {TEXT} nor {OBJECT}")
    except InfraError as error:
        raise InfraError(f"{error}: {said}" if said else str(error)) from error
    return Judgement(reward, said if exit_code and not reward else "")


def _read(path: Path) -> str | None:
    """Return the text of a file, None where there is none. What the tests ran may have put anything there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InfraError(f"{path.name} cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InfraError(f"{path.name} is not a file")
        data = file.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise InfraError(f"{path.name} has over {BYTES_MAX} bytes")
    return data.decode(errors="replace")


def _of_object(text: str) -> float:
    try:
        found = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InfraError(f"{OBJECT} is not an object of rewards: {error}") from error
    return _number(_one_of(found), OBJECT)


def _one_of(found: Mapping[str, object]) -> object:
    if "reward" in found:
        return found["reward"]
    if len(found) == 1:
        return next(iter(found.values()))
    names = ", ".join(sorted(found))[:200]
    raise InfraError(f"{OBJECT} has the rewards {names or 'of nothing'}, and none of them is called `reward`")


def _number(value: object, name: str) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) else None
    except (ValueError, OverflowError):
        number = None
    if number is None or not is_reward(number):
        raise InfraError(
            f"{name} has {str(value).strip()[:80]!r}, and a reward is a number of at most {REWARD_MAX:.0e}"
        )
    return number
