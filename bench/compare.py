"""Runs benchmarks on another commit and on this tree in turn, and prints the ratios of their figures with their spread.

make bench-compare REV=18063d94
python -m bench.compare HEAD~1 gateway turns --times 5

Both are measured by this tree's benchmarks, with the packages of this environment. A commit that lacks the names that
they import is measured by those of a commit in between: `--benchmarks 709452ff` for one before its modules were
renamed. Machines are noisy: a figure counts where the pairs agree. `instructions` are the same in each
run, and take valgrind.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "gateway": ["bench.gateway"],
    "turns": ["bench.turns"],
    "coordinator": ["bench.coordinator", "--seconds", "1.5"],
    "instructions": ["bench.instructions"],
    "episodes": ["bench.episodes"],
    "operations": ["bench.operations"],
}
FIGURE = re.compile(r"CPU +(?P<cpu>[\d.]+ [mu]s)|(?P<other>[\d.]+ (?:ms of CPU|episodes/s|MB|k instructions))")
LABEL = re.compile(r"\s*(.+?)(?::|\s{2,})")


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Have the files of a commit in a temporary folder for the block."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(where), revision], check=True)
        try:
            yield where
        finally:
            subprocess.run([*git, "remove", "--force", str(where)], check=True)


def figures(tree: Path, part: str, benchmarks: Path) -> list[tuple[str, float, str]]:
    """Run a benchmark of `benchmarks` on the packages of `tree`; return a label, a number and a unit for each line."""
    packages = [str(tree / "shared"), *map(str, sorted((tree / "services").iterdir()))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
    command = [sys.executable, "-m", *PARTS[part]]
    done = subprocess.run(command, cwd=benchmarks, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{part} failed on {tree}, exit status {done.returncode}:\n{done.stdout}{done.stderr}")
    found: list[tuple[str, float, str]] = []
    for line in done.stdout.splitlines():
        label, figure = LABEL.match(line), FIGURE.search(line)
        if label and figure:
            number, unit = (figure["cpu"] or figure["other"]).split(" ", 1)
            found.append((label[1], float(number), unit))
    return found


def report(part: str, before: list[list[tuple[str, float, str]]], after: list[list[tuple[str, float, str]]]) -> None:
    for lines in zip(*before, *after):
        label, _, unit = lines[-1]
        numbers = [number for _, number, _ in lines]
        old, new = numbers[: len(before)], numbers[len(before) :]
        ratios = sorted(b / a for a, b in zip(old, new))
        medians = statistics.median(old), statistics.median(new)
        print(
            f"{part:12} {label:34} {medians[0]:9.3f} {medians[1]:9.3f} {unit:12}"
            f" ratio {medians[1] / medians[0]:4.2f}  pairs {ratios[0]:4.2f} to {ratios[-1]:4.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="the commit to compare with")
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], metavar="part", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--times", type=int, default=3, help="pairs of runs (default: 3)")
    parser.add_argument("--benchmarks", metavar="REVISION", help="measure the other commit by this one's benchmarks")
    arguments = parser.parse_args()
    with checked_out(arguments.revision) as other, ExitStack() as stack:
        older = stack.enter_context(checked_out(arguments.benchmarks)) if arguments.benchmarks else ROOT
        benchmarks = {other: older, ROOT: ROOT}
        print(f"{'':47} {arguments.revision[:9]:>9} {'this':>9}", flush=True)
        for part in arguments.part or [part for part in PARTS if part != "instructions" or shutil.which("valgrind")]:
            found: dict[Path, list[list[tuple[str, float, str]]]] = {other: [], ROOT: []}
            for number in range(arguments.times):
                for tree in (other, ROOT) if number % 2 == 0 else (ROOT, other):  # neither is always first
                    found[tree].append(figures(tree, part, benchmarks[tree]))
            report(part, found[other], found[ROOT])


if __name__ == "__main__":
    main()
