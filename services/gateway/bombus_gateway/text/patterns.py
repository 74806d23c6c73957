"""Regular expressions that match any of many names."""

import re
from collections.abc import Collection, Iterable


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the names, and the longest if several match."""
    return re.compile(_branches(set(names) - {""}) or r"(?!)")


def _branches(names: Collection[str]) -> str:
    """Return a pattern that tries each common prefix of the names only once, since some models have a thousand
    names."""
    rests: dict[str, set[str]] = {}
    for name in names:
        if name:
            rests.setdefault(name[0], set()).add(name[1:])
    branches = [re.escape(first) + _branches(rest) for first, rest in sorted(rests.items())]
    if "" in names:
        return f"(?:{'|'.join(branches)})?" if branches else ""
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
