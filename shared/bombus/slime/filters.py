"""Dynamic sampling: which groups are kept, and what a filter may answer."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bombus.hive.rewards import differ
from bombus.slime.types import SlimeSample


@dataclass
class DynamicFilterOutput:
    """Whether a group is kept, and the reason under which a dropped one is counted.

    `keep_when_insufficient` keeps it nevertheless where another round of sampling would be needed.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def as_filter_output(given: object) -> DynamicFilterOutput:
    """Return the answer of a filter, which may be just a truth value. Works with the real slime's class too."""
    if hasattr(given, "keep"):
        reason = getattr(given, "reason", None)
        return DynamicFilterOutput(bool(given.keep), reason, bool(getattr(given, "keep_when_insufficient", False)))
    return DynamicFilterOutput(bool(given))


def flattened(group: Sequence[Any]) -> list[Any]:
    """Return the samples of a group in which some attempts may be lists of samples."""
    return [one for each in group for one in (each if isinstance(each, list) else [each])]


def check_reward_nonzero_std(args: Namespace, samples: Sequence[Any], **_: object) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: one in which all are equal teaches nothing."""
    rewards = [float(sample.get_reward_value(args)) for sample in flattened(samples)]
    keep = differ(rewards)
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Namespace, samples: Sequence[SlimeSample]) -> DynamicFilterOutput:
    """Do the same, and keep a group nevertheless where the batch would not be filled."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output
