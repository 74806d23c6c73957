"""Play seeded runs, healthy and with one fault each, diagnose them, and write the tables of docs/diagnose.md.

The rules were tuned on the seeds of `--tuning` alone. The published tables have other seeds, which nobody looked at
before the rules were final.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from bench.diagnose.baseline import THRESHOLDS, alarms
from bench.diagnose.faults import FAULTS
from bench.diagnose.recipes import RECIPES
from bench.diagnose.simulation import Simulation
from bombus.replay.diagnosis.diagnose import at_step, diagnose
from bombus.replay.diagnosis.findings import FaultKind
from bombus.replay.diagnosis.statistics import median
from bombus.replay.diagnosis.steps import RunSeries

PAGE = Path(__file__).parents[2] / "docs/diagnose.md"
MARK = "<!-- measured by `make diagnose-bench` -->\n"
TUNING, PUBLISHED = 0, 4_000_000  # the first seeds; those from 1, 2 and 3 million on were published before
RUNS, HEALTHY = 10, 120  # of each kind, and without a fault
SOON = 10  # steps within which a fault is to be found
ONSET = 10  # the earliest


@dataclass
class Tally:
    """What was found of the runs with one kind of fault. `delays` are in steps from its onset to the first finding."""

    runs: int = 0
    found: int = 0  # as a cause, not among the consequences of another
    consequences: int = 0
    delays: list[int] = field(default_factory=list)
    wrong: int = 0  # findings of this kind, as a cause, in runs that do not have it or do not have it yet
    baseline: int = 0

    @property
    def recall(self) -> float:
        return self.found / self.runs

    @property
    def precision(self) -> float:
        return self.found / max(1, self.found + self.wrong)


@dataclass
class Measured:
    kinds: dict[FaultKind, Tally] = field(default_factory=lambda: {kind: Tally() for kind in FAULTS})
    healthy: int = 0
    alarmed: list[tuple[str, int, str, int]] = field(default_factory=list)  # recipe, seed, kind, step
    alarmed_baseline: int = 0
    missed: list[str] = field(default_factory=list)


def measure(first_seed: int, runs: int, healthy: int, only: list[str]) -> Measured:
    measured = Measured()
    recipes = list(RECIPES.values())
    for number in range(0 if only else healthy):
        seed = first_seed + number
        recipe = recipes[number % len(recipes)]
        run = Simulation(recipe, seed).play()
        measured.healthy += 1
        measured.alarmed_baseline += bool(alarms(run))
        for finding in diagnose(run.steps, run.job):
            measured.kinds[finding.kind].wrong += 1
            measured.alarmed.append((recipe.name, seed, finding.kind, finding.step))
    for kind in FAULTS:
        if not only or kind in only:
            for number in range(runs):
                _measure_fault(measured, kind, first_seed + number)
    return measured


def _measure_fault(measured: Measured, kind: FaultKind, seed: int) -> None:
    fault, fits = FAULTS[kind]
    chance = Random(f"{kind} {seed}")
    recipe = chance.choice([recipe for recipe in RECIPES.values() if fits(recipe)])
    onset, strength = chance.randint(ONSET, recipe.steps - 15), chance.random()
    run = Simulation(recipe, seed, fault, onset, strength).play()
    tally = measured.kinds[kind]
    tally.runs += 1
    causes = diagnose(run.steps, run.job)
    found_at = first_found(run, kind, onset)
    is_cause = any(finding.kind == kind for finding in causes) and found_at is not None
    tally.found += is_cause
    tally.consequences += not is_cause and found_at is not None
    if is_cause and found_at is not None:
        tally.delays.append(found_at - onset)
    else:
        shown = ", ".join(f"{finding.kind} at {finding.step}" for finding in causes) or "nothing"
        measured.missed.append(f"{kind}, seed {seed}, {recipe.name}, step {onset}, strength {strength:.2f}: {shown}")
    for finding in causes:
        if finding.kind != kind or finding.until < onset:
            measured.kinds[finding.kind].wrong += 1
    tally.baseline += alarms(run).get(kind, -1) >= onset


def first_found(run: RunSeries, kind: FaultKind, onset: int) -> int | None:
    """Return the first step from the onset on at which a kind is found."""
    ends = range(onset, len(run.steps) + 1)
    return next((end for end in ends if any(each.kind == kind for each in at_step(run.steps, end, run.job))), None)


# ---- the page -----------------------------------------------------------------------------------------------------


def tables(measured: Measured) -> str:
    kinds = {kind: tally for kind, tally in measured.kinds.items() if tally.runs}
    runs, found = sum(each.runs for each in kinds.values()), sum(each.found for each in kinds.values())
    soon = sum(delay <= SOON for each in kinds.values() for delay in each.delays)
    baseline = sum(each.baseline for each in kinds.values())
    false = len({each[:2] for each in measured.alarmed})
    lines = [
        f"Of {runs} faults, {found} were found ({100 * found / runs:.0f} %), {soon} of these within {SOON} steps. "
        f"Of {measured.healthy} healthy runs, {false} had a false alarm at any step.",
        "",
        f"The {len(THRESHOLDS)} thresholds found {baseline} of the same faults ({100 * baseline / runs:.0f} %), and "
        f"raised an alarm in {measured.alarmed_baseline} of the healthy runs.",
        "",
        "| kind | found | recall | precision | median steps to the finding | longest | thresholds |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, tally in kinds.items():
        delays = f"{median(tally.delays):.0f} | {max(tally.delays)}" if tally.delays else "| "
        lines.append(
            f"| `{kind}` | {tally.found} of {tally.runs} | {100 * tally.recall:.0f} % | "
            f"{100 * tally.precision:.0f} % | {delays} | {100 * tally.baseline / tally.runs:.0f} % |"
        )
    if measured.alarmed:
        lines += ["", "False alarms in healthy runs:", ""]
        lines += [f"- `{kind}` at step {step} of {name}, seed {seed}" for name, seed, kind, step in measured.alarmed]
    if measured.missed:
        lines += ["", "Faults that were not found, or not as the cause, and what was found instead:", ""]
        lines += [f"- {line}" for line in measured.missed]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.diagnose", description=__doc__)
    parser.add_argument("--tuning", action="store_true", help="the seeds for tuning: print the tables, write nothing")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help="of each kind (default: %(default)s)")
    parser.add_argument("--kind", nargs="+", default=[], choices=sorted(FAULTS), metavar="KIND", help="only these")
    arguments = parser.parse_args()
    first_seed = TUNING if arguments.tuning else PUBLISHED
    text = tables(measure(first_seed, arguments.runs, HEALTHY, arguments.kind))
    print(text)
    if not arguments.tuning and not arguments.kind:
        head, _, _ = PAGE.read_text().partition(MARK)
        PAGE.write_text(head + MARK + "\n" + text)


if __name__ == "__main__":
    main()
