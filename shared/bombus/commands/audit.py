"""`bombus audit`: account for every sampled token on a hive's log."""

import argparse

import msgspec

from bombus.hive.fates import Fate
from bombus.replay.audit.audit import Audit
from bombus.replay.audit.report import AuditReport
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import run_on_source
from bombus.replay.source import Source
from bombus.terminal import say

DESCRIPTION = """Accounts for every sampled token: trained on, masked by a rule, dropped for a reason, for evaluation,
or still outstanding. Rollout groups and training operations are accounted for too. The exit status is 1 if the
log contradicts itself anywhere, for example if a step does not account for what its episodes sampled."""
SHOWN = 10  # the most differences that are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "--json", action="store_true", help="print everything as JSON, with totals by run, client and version"
    )
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    reports: list[AuditReport] = []

    async def audit(source: Source, arguments: argparse.Namespace) -> None:
        reports.append(await audited(source))
        for line in (
            [msgspec.json.encode(reports[0]).decode()] if arguments.json else lines_of(reports[0], source.title)
        ):
            say(line)

    code = run_on_source("bombus audit", audit, arguments)
    return code or int(reports[0].differences_count > 0)


async def audited(source: Source) -> AuditReport:
    """Audit a whole log."""
    hive, position = await source.base()
    audit = Audit(hive, position)
    async for entry in source.events(position):
        audit.read(entry.event, entry.seq)
    return audit.report()


def lines_of(report: AuditReport, title: str) -> list[str]:
    lines = [f"{title}: {report.sampled:,} sampled tokens"]
    known = {str(fate): number for number, fate in enumerate(Fate)}
    for fate, count in sorted(report.tokens.items(), key=lambda each: (known.get(each[0], len(known)), each[0])):
        lines.append(f"  {count:>14,}  {count / max(report.sampled, 1):6.1%}  {fate}")
    if report.steps:
        trained = sum(step.tokens for step in report.steps)
        lines.append(f"{len(report.steps):,} steps trained on {trained:,} tokens")
    for what, counts in (("rollout groups", report.groups), ("training operations", report.operations)):
        if counts:
            lines.append(f"{what}:")
            lines += [f"  {count:>14,}  {name}" for name, count in counts.items()]
    if not report.differences_count:
        lines.append("no differences: every token is accounted for")
    else:
        lines.append(f"{report.differences_count:,} differences, the first of which are:")
        for found in report.differences[:SHOWN]:
            where = f"engine {found.engine}" + (f", episode {found.episode}" if found.episode else "")
            lines.append(f"  event {found.seq:,}, {where}: {found.why}")
    return lines
