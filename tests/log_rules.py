"""Writes the list of rules and tests at the end of docs/log.md: `python -m tests.log_rules`.

A test of rule N is named `test_rN_...`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "log.md"
MARK = "<!-- rules -->\n"
RULES = range(1, 21)

WHOLE = "the whole rule"
NOT_BUILT = {
    15: "pinned versions, NCCL",
}


def tests() -> Iterator[str]:
    """Yield every test as `folder/file.py::name`."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE):
            yield f"{path.relative_to(TESTS).as_posix()}::{name}"


def held_by() -> dict[int, list[str]]:
    """Return the tests of each rule."""
    found: dict[int, list[str]] = {rule: [] for rule in RULES}
    for test in tests():
        named = re.search(r"::test_r(\d+)_", test)
        if named:
            found[int(named[1])].append(test)
    return found


def listing() -> str:
    lines = []
    for rule, found in held_by().items():
        lines.append(f"- **R{rule}**" + (f" (not built yet: {NOT_BUILT[rule]})" if rule in NOT_BUILT else ""))
        lines += [f"  - `{test}`" for test in found]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return docs/log.md with the list that the sources give."""
    return PAGE.read_text().partition(MARK)[0] + MARK + listing()


if __name__ == "__main__":
    PAGE.write_text(page())
