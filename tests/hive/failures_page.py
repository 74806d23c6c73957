"""Writes the table of kinds in docs/failures.md from the sources: `python -m tests.hive.failures_page`."""

from pathlib import Path

from bombus.hive.failures import FAILURES

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
BEGIN, END = "<!-- kinds of failure -->\n", "<!-- end of kinds -->\n"


def table() -> str:
    rows = [
        f"| `{kind}` | {rule.meaning} | {'with a reward, if there is one' if rule.is_trained else 'never'} |"
        for kind, rule in FAILURES.items()
    ]
    return "\n".join(["| kind | what has happened | trained on |", "|---|---|---|", *rows]) + "\n"


def page() -> str:
    """Return docs/failures.md with the table that the sources give."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
