"""Play seeded runs, healthy and with one fault each, diagnose them, and write the tables of docs/diagnose.md.

The rules were tuned on the seeds of `--tuning` alone. The published tables have other seeds, which nobody looked at
before the rules were final. Real runs of `make demo-tiny` are diagnosed from the figures that were recorded of them;
`--record` plays them again.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from bench.diagnose import real
from bench.diagnose.baseline import THRESHOLDS, alarms
from bench.diagnose.faults import FAULTS
from bench.diagnose.recipes import RECIPES
from bench.diagnose.simulation import Simulation
from bombus.config.job import RunConfig
from bombus.replay.diagnosis.diagnose import at_step, diagnose
from bombus.replay.diagnosis.findings import FaultKind, RunFinding
from bombus.replay.diagnosis.statistics import median
from bombus.replay.diagnosis.steps import RunSeries, StepFigures

PAGE = Path(__file__).parents[2] / "docs/diagnose.md"
MARK = "<!-- measured by `make diagnose-bench` -->\n"
TUNING, PUBLISHED = 0, 8_000_000  # the first seeds; those from 1 to 7 million on were published before
RUNS, HEALTHY = 10, 120  # of each kind, and without a fault
SOON = 10  # steps within which a fault is to be found
ONSET = 10  # the earliest
LEARNED = 0.9  # of the highest reward: a run at which `too_easy` is right, although it is healthy


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
    learned: int = 0  # healthy runs that were rightly said to have become too easy
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
        findings = diagnose(run.steps, run.job)
        measured.learned += any(is_learned(finding, run.steps) for finding in findings)
        for finding in findings:
            if is_learned(finding, run.steps):
                continue
            measured.kinds[finding.kind].wrong += 1
            measured.alarmed.append((recipe.name, seed, finding.kind, finding.step))
    for kind in FAULTS:
        if not only or kind in only:
            for number in range(runs):
                _measure_fault(measured, kind, first_seed + number)
    return measured


def is_learned(finding: RunFinding, steps: Sequence[StepFigures]) -> bool:
    """Return whether a finding says that the tasks are too easy, and the model has learned them."""
    before = [row for row in steps if row.step < finding.step]
    now = next(row for row in steps if row.step == finding.step)
    highest = max(row.highest for row in steps)
    risen = bool(before) and before[0].rewards.mean < now.rewards.mean / 2
    return finding.kind == FaultKind.TOO_EASY and risen and now.rewards.mean > LEARNED * highest


def _measure_fault(measured: Measured, kind: FaultKind, seed: int) -> None:
    fault, fits = FAULTS[kind]
    chance = Random(f"{kind} {seed}")
    recipe = chance.choice([recipe for recipe in RECIPES.values() if fits(recipe)])
    onset, strength = chance.randint(ONSET, recipe.steps - recipe.plateau - 15), chance.random()
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
        if (finding.kind != kind or finding.until < onset) and not is_learned(finding, run.steps):
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
        f"Of {measured.healthy} healthy runs, {false} had a false alarm at any step; {measured.learned} that converge "
        "were rightly said to have become `too_easy`.",
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


def real_table() -> str:
    """Return what is said of the real runs: of the healthy ones, of faults that have a kind, and of others."""
    found: dict[str, list[RunFinding]] = {}
    lines = ["| real run | steps | fault from | reward | said |", "|---|---|---|---|---|"]
    runs = {each.name: each for each in real.load()}
    for run in (each for each in real.RUNS.values() if each.name in runs):
        steps = runs[run.name].steps
        found[run.name] = diagnose(steps, RunConfig.from_json(runs[run.name].job))
        said = ", ".join(f"`{each.kind}` at {each.step}" for each in found[run.name]) or "nothing"
        rewards = f"{steps[0].rewards.mean:.2f} to {steps[-1].rewards.mean:.2f}"
        lines.append(f"| {run.name} | {len(steps)} | {'' if run.is_healthy else run.onset} | {rewards} | {said} |")

    def is_alarmed(run: real.RealRun) -> bool:
        return any(not is_learned(each, runs[run.name].steps) for each in found[run.name])

    healthy = [run for run in real.HEALTHY if run.name in runs]
    faulty = [run for run in real.FAULTY if run.name in runs and not run.is_other]
    right = sum(any(each.kind in run.expected for each in found[run.name]) for run in faulty)
    head = (
        f"Of {len(healthy)} healthy real runs, {sum(map(is_alarmed, healthy))} had a false alarm. Of {len(faulty)} "
        f"real runs with a fault of the list, {right} were found."
    )
    return "\n".join([head, "", *lines]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.diagnose", description=__doc__)
    parser.add_argument("--tuning", action="store_true", help="the seeds for tuning: print the tables, write nothing")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help="of each kind (default: %(default)s)")
    parser.add_argument("--kind", nargs="+", default=[], choices=sorted(FAULTS), metavar="KIND", help="only these")
    parser.add_argument(
        "--record", nargs="*", metavar="RUN", help="play real runs (default: all), and keep their figures"
    )
    arguments = parser.parse_args()
    if arguments.record is not None:
        asyncio.run(real.record(arguments.record))
        return
    first_seed = TUNING if arguments.tuning else PUBLISHED
    text = tables(measure(first_seed, arguments.runs, HEALTHY, arguments.kind))
    text += "" if arguments.kind else "\n" + real_table()
    print(text)
    if not arguments.tuning and not arguments.kind:
        head, _, _ = PAGE.read_text().partition(MARK)
        PAGE.write_text(head + MARK + "\n" + text)


if __name__ == "__main__":
    main()
