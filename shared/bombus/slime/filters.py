"""Dynamic sampling: filters that choose the groups to keep, and the results that a filter may return."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bombus.hive.rewards import differ
from bombus.slime.types import SlimeSample


@dataclass
class DynamicFilterOutput:
    """A filter's verdict on a group: whether the group is kept and, if not, the reason under which it is counted.

    With `keep_when_insufficient`, the group is kept anyway if the batch would otherwise need another round of sampling.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def as_filter_output(given: object) -> DynamicFilterOutput:
    """Convert a filter's result, which may also be just a truth value or an object of slime's own class."""
    if hasattr(given, "keep"):
        reason = getattr(given, "reason", None)
        return DynamicFilterOutput(bool(given.keep), reason, bool(getattr(given, "keep_when_insufficient", False)))
    return DynamicFilterOutput(bool(given))


def flattened(group: Sequence[Any]) -> list[Any]:
    """Return the samples of a group as one flat list. An attempt in the group may itself be a list of samples."""
    return [one for each in group for one in (each if isinstance(each, list) else [each])]


def check_reward_nonzero_std(args: Namespace, samples: Sequence[Any], **_: object) -> DynamicFilterOutput:
    """Keep a group if its rewards differ, because equal rewards give no training signal."""
    rewards = [float(sample.get_reward_value(args)) for sample in flattened(samples)]
    keep = differ(rewards)
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Namespace, samples: Sequence[SlimeSample]) -> DynamicFilterOutput:
    """Filter as `check_reward_nonzero_std` does, but keep any group that is needed to fill the batch."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output
