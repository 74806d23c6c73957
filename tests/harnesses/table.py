"""Writes docs/harnesses.md from the catalogue and what the tests measured: `python -m tests.harnesses.table`."""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby

from tests.harnesses.catalogue import HARNESSES, Harness
from tests.harnesses.install import ROOT, version_of
from tests.harnesses.results import Result, results

PAGE = ROOT / "docs" / "harnesses.md"
_TEMPORARY = re.compile(r"/\S*pytest\S*")
SHOWN = 60  # characters of a rewritten text

BEGINNING = """\
# Harnesses

This page is generated (`python -m tests.harnesses.table`) from what `make test-harnesses` measured: each harness below
is installed from its package index in this version and plays episodes, unmodified, against a hive whose model is
scripted. The model writes a program, reads it, runs it, looks at two files at once and says that it is done. For aider,
which has no tools, it fixes a file until a test passes.

In every episode each token that was sampled is trained exactly once. Sequences are those of one such episode: 1 means
that the harness only appends, so that every call extends the one before it. A harness that rewrites its history begins
a sequence where it does so; [below](#what-is-rewritten) are the tokens that differ. With the variables and settings of
`tests/harnesses/catalogue/`, harnesses contact no host other than the gateway, unless their row says so.

Overridden is what a harness asks for but does not get in a training episode, as the header `x-bombus-overridden` of
each answer says; `max_tokens` is capped at the job's limit per turn, which is 4096 here.

`make test-harnesses` needs npm, and Python 3.12 for openhands-sdk (`HARNESSES_PYTHON` names one that is not on PATH).
What cannot be installed is reported in one line, and its tests are skipped.

"""

COLUMNS = (
    "harness",
    "version",
    "dialect",
    "how to point it",
    "answers",
    "calls",
    "sequences",
    "what is overridden",
    "what does not work",
)

RETRIES = """
## Retries

Every harness here sends a call again that was answered 503, and it is sampled once. An answer that gets lost on its
way is sent again where the retry is marked (`x-stainless-retry-count`). Where it is not, the call is sampled again and
is a sequence of its own; both are trained, since both were sampled. These do not mark retries: {unmarked}.
"""

REWRITTEN = """
## What is rewritten

The first tokens that differ, in the first request that does not continue what was sampled: before, and now.
"""


def page(found: Mapping[tuple[str, str], Result]) -> str:
    silent = [harness for harness in HARNESSES if harness.own_retries and not harness.marks_retries]
    unmarked = [f"{harness.name} ({harness.dialect})" for harness in silent]
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    parts = [BEGINNING + "\n".join([*head, *(row(harness, found) for harness in HARNESSES)])]
    parts.append(RETRIES.format(unmarked=", ".join(unmarked)))
    parts.append(REWRITTEN)
    return "\n".join([*parts, *rewritten(found), ""])


def row(harness: Harness, found: Mapping[tuple[str, str], Result]) -> str:
    measured = [found[harness.id, way] for way in harness.ways if (harness.id, way) in found]
    cells = [
        harness.name,
        version_of(harness.environment, harness.package),
        harness.dialect,
        harness.pointed,
        " or ".join(harness.ways),
        str(harness.calls),
        str(harness.sequences) + (f": {harness.because}" if harness.because else ""),
        ", ".join(f"`{name}`" for name in sorted({name for each in measured for name in each.overridden})),
        harness.fails or harness.caveats,
    ]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def rewritten(found: Mapping[tuple[str, str], Result]) -> Iterator[str]:
    """Yield a line for each harness that rewrites its past."""
    for name, several in groupby(found.values(), key=lambda result: result.harness):
        first = next((result.rewrites[0] for result in several if result.rewrites), None)
        if first is not None:
            where = f"call {first.call + 1}, after {first.shared} tokens"
            yield f"- {name}, {where}: {quoted(first.before)}, now {quoted(first.now)}"


def quoted(text: str) -> str:
    return f"`` {_TEMPORARY.sub('FOLDER', text)[:SHOWN]!r} ``"


def listed(text: str) -> dict[str, str]:
    """Return the version of each harness that a page has, by its id."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")]
    return {f"{name}, {dialect}": version for _, name, version, dialect, *_ in rows[1:]}


def main() -> None:
    found = results()
    missing = [harness.id for harness in HARNESSES for way in harness.ways if (harness.id, way) not in found]
    if missing:  # one that is not installed was skipped; where one has failed, so has the command before this
        print(f"docs/harnesses.md is left as it is: nothing was measured of {', '.join(dict.fromkeys(missing))}")
    else:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
