"""`bombus doctor`: checks what this machine can run and what is missing, without starting anything."""

import argparse
from pathlib import Path

import msgspec

from bombus.commands.deployment import add_deployment_arguments, deployment, tell_ignored
from bombus.host.doctor import Finding, State, examine_machine
from bombus.host.doctor_deployment import examine_deployment, longest_sequence, needed
from bombus.host.doctor_model import examine_model
from bombus.host.doctor_streams import examine_streams
from bombus.terminal import say, say_json

WIDTH = 26


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_deployment_arguments(parser)
    parser.add_argument(
        "--model",
        metavar="PATH_OR_NAME",
        help="a model to check: does its chat template render, and do engine and trainer support its architecture",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    cluster, jobs = deployment(arguments)
    tell_ignored(jobs)
    gateway = cluster.gateway
    findings = examine_machine(
        Path(cluster.data_dir), gateway.host, gateway.port if gateway.count else 0, needed(cluster)
    )
    findings += examine_streams(cluster)
    if arguments.config is not None:
        findings += examine_deployment(cluster, jobs)
    if arguments.model is not None:
        given = next((job.model for job in jobs.values() if job.model.path == arguments.model), None)
        findings += examine_model(arguments.model, longest_sequence(jobs), given)
    bad = [finding for finding in findings if finding.state == State.MISSING]
    if arguments.json:
        document = {"ok": not bad, "findings": [msgspec.to_builtins(finding) for finding in findings]}
        say_json(document)
    else:
        say(*(line for finding in findings for line in _lines(finding)), "", _verdict(arguments.config, bad))
    return int(bool(bad))


def _lines(finding: Finding) -> list[str]:
    line = f"{finding.state:<9} {finding.what:<{WIDTH}} {finding.detail}"
    if finding.state == State.OK or not finding.todo:
        return [line]
    return [line, f"{' ' * (WIDTH + 10)}-> {finding.todo}"]


def _verdict(config: Path | None, bad: list[Finding]) -> str:
    what = config if config is not None else "`bombus up`"
    return f"{what} can run here." if not bad else f"{what} cannot run here: {', '.join(each.what for each in bad)}."
