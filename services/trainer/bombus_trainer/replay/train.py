"""`bombus replay train`: repeats a logged step and compares all bytes, or trains a branch with changed settings."""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from bombus.config.flags import made_of_flags
from bombus.config.job import RunConfig, validated
from bombus.errors import BombusError, Code, Refused
from bombus.private import private_folder
from bombus.replay.logged_run import LoggedRun, read_run
from bombus.replay.opening import add_source_arguments, open_source
from bombus.replay.source import Source
from bombus.terminal import complain, say
from bombus_trainer.loading import load_executor
from bombus_trainer.machine import this_machine
from bombus_trainer.options import TrainerOptions
from bombus_trainer.publish.export import VersionTarget, export
from bombus_trainer.replay.batch import add_run_arguments
from bombus_trainer.replay.retraining import Retraining, Trained, logged_machine, logged_settings
from bombus_trainer.settings import TrainerSettings

METRICS = "metrics.json"
WEIGHTS = "model"
SHOWN = ("loss", "grad_norm", "reward_mean", "importance_capped")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--step", type=int, metavar="N", help="retrain this step and compare its weights with those in the log"
    )
    what.add_argument("--from", type=int, metavar="A", dest="first", help="train a branch from step A on")
    parser.add_argument("--to", type=int, metavar="B", dest="last", help="with --from: the branch's last step")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a trainer setting of the branch, such as lr"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the branch's weights and metrics")
    add_run_arguments(parser)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        default=0,
        help="threads of torch on the CPU; 0: as many as the trainer had (default: %(default)s)",
    )
    parser.add_argument("--allow-download", action="store_true", help="allow downloading the model from a hub")


def run(arguments: argparse.Namespace) -> int:
    disable_progress_bar()
    try:
        return asyncio.run(_run(arguments))
    except Refused as refused:
        complain(f"bombus replay train: {refused.why}")
        return 2
    except BombusError as error:
        complain(f"bombus replay train: {error}")
        return 1


async def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    async with open_source(arguments) as source:
        logged = await read_run(source, arguments.engine, arguments.run)
        if arguments.step is not None:
            return await again(source, logged, arguments.step, arguments)
        return await branch(source, logged, arguments)


def _check(arguments: argparse.Namespace) -> None:
    options = {"folder": Path(), "device": arguments.device, "threads": arguments.threads}
    made_of_flags(TrainerOptions, options, {})  # refuses the same values as a trainer
    if arguments.step is not None:
        if arguments.last is not None or arguments.set or arguments.out is not None:
            raise Refused(Code.MALFORMED, "--to, --set and --out belong to a branch: pass --from instead of --step")
        return
    if arguments.last is None or arguments.out is None:
        raise Refused(Code.MALFORMED, "a branch needs --from A --to B --out DIR")
    if not 1 <= arguments.first <= arguments.last:
        raise Refused(Code.MALFORMED, f"there are no steps from {arguments.first} to {arguments.last}")
    if arguments.out.exists() and (not arguments.out.is_dir() or any(arguments.out.iterdir())):
        raise Refused(Code.MALFORMED, f"{arguments.out} is not empty: name another --out, or remove it")


# ---- retraining a step ------------------------------------------------------------------------------------------


async def again(source: Source, logged: LoggedRun, step: int, arguments: argparse.Namespace) -> int:
    """Repeat a step. Returns 0 if its bytes agree with the log, or 1 if they do not."""
    settings = _prepare(logged, step, arguments)
    executor = await asyncio.to_thread(load_executor, settings, arguments.allow_download)
    replay = await Retraining.at(source, logged, step - 1, executor, _say)
    while replay.step < step:
        trained = await replay.make(replay.step + 1)
        _say(_line(trained) + _verdict(trained))
    if not trained.logged_sha256:
        _say(f"the log has no weights of version {step} to compare with")
        return 1
    if trained.agrees:
        _say(f"step {step} matches: its weights are identical to version {step}, sha256 {trained.sha256}")
        return 0
    _say(f"step {step} does not match: in the log it has sha256 {trained.logged_sha256}, but here {trained.sha256}")
    _say(_explanation(logged, trained, settings.device))
    return 1


def _prepare(logged: LoggedRun, step: int, arguments: argparse.Namespace) -> TrainerSettings:
    """Use the trainer's number of threads, which determines the order of sums, and return its settings at the step."""
    done = logged.step(step).done
    recorded = int(done.metrics.get("torch_threads", 0)) if done is not None else 0
    if arguments.threads or recorded:
        torch.set_num_threads(arguments.threads or recorded)
    return logged_settings(logged, step, arguments.device)


def _verdict(trained: Trained) -> str:
    if not trained.logged_sha256:
        return ""
    return "; the bytes match those in the log" if trained.agrees else "; the bytes differ from those in the log"


def _explanation(logged: LoggedRun, trained: Trained, device: str) -> str:
    """Return what is known about whether, and why, the bytes may differ although nothing is wrong."""
    here = this_machine(device)
    done = logged.step(trained.step).done
    trained_on = logged_machine(done) if done is not None else ""
    threads = int(trained.logged.get("torch_threads", 0))
    if trained_on and trained_on != here:
        return (
            f"it was made on another machine ({trained_on}; this is {here}): reordered sums differ in their last bits"
        )
    if trained_on:
        return f"the machine is the same ({here}): a difference here means that the model, the log or the code changed"
    if threads and threads != torch.get_num_threads():
        return f"it was made with {threads} threads, here with {torch.get_num_threads()}: pass --threads {threads}"
    return (
        f"this is {here}; the machine that made the step is not known, as there is no checkpoint of it. On another "
        "machine, or with another version of torch, the last bits differ"
    )


# ---- a branch ---------------------------------------------------------------------------------------------------


async def branch(source: Source, logged: LoggedRun, arguments: argparse.Namespace) -> int:
    first, last = arguments.first, arguments.last
    job = changed(logged.job, arguments.set)
    for step in range(first, last + 1):
        logged.step(step)
    settings = _prepare(logged, first, arguments)
    executor = await asyncio.to_thread(load_executor, settings, arguments.allow_download)
    replay = await Retraining.at(source, logged, first - 1, executor, _say)
    while replay.step < first - 1:
        trained = await replay.make(replay.step + 1)
        _say(f"on the way: {_line(trained)}{_verdict(trained)}")
    changed_settings = TrainerSettings.of_job(job, arguments.device, settings.bin_tokens)
    await replay.branch(changed_settings, arguments.allow_download)
    private_folder(arguments.out)
    steps: list[Trained] = []
    for step in range(first, last + 1):
        steps.append(await replay.make(step))
        _say(_line(steps[-1]))
        _write_metrics(arguments.out / METRICS, logged, arguments.set, steps)
    weights = export(replay.executor, VersionTarget(arguments.out, last, 0))
    Path(weights.where).rename(arguments.out / WEIGHTS)
    _say(f"weights of step {last} (load them with transformers): {arguments.out / WEIGHTS}")
    _say(f"metrics, alongside those in the log: {arguments.out / METRICS}")
    return 0


def changed(job: RunConfig, assignments: list[str]) -> RunConfig:
    """Return the job with some trainer settings changed, along with the defaults that follow from the changed settings.

    Raises `Refused` for an unknown setting or an invalid value.
    """
    tree = {**job.model_dump(mode="json"), "trainer": job.trainer.own_choices()}
    names: dict[str, str] = {}  # how error messages name the settings
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        group, _, field = name.rpartition(".")
        if not equals or group not in ("", "trainer"):
            raise Refused(Code.BAD_CONFIG, f"--set {assignment} is refused: pass a trainer setting, such as lr=1e-4")
        tree["trainer"][field] = _value(text)
        names[f"trainer.{field}"] = f"--set {name}"
    return validated(tree, names)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _write_metrics(path: Path, logged: LoggedRun, assignments: list[str], steps: list[Trained]) -> None:
    rows = [{"step": each.step, "branch": each.metrics, "log": each.logged, "sha256": each.sha256} for each in steps]
    report = {"engine": logged.engine, "run": logged.run, "set": assignments, "steps": rows}
    path.write_text(json.dumps(report, indent=2))


# ---- output -----------------------------------------------------------------------------------------------------


def _line(trained: Trained) -> str:
    """Format a step as `step 3: loss 0.01 (log 0.02), grad_norm 0.5`, with the log's value if it differs."""
    parts = []
    for name in (each for each in SHOWN if each in trained.metrics):
        ours, logged = f"{trained.metrics[name]:.4g}", f"{trained.logged.get(name, trained.metrics[name]):.4g}"
        parts.append(f"{name} {ours}" if ours == logged else f"{name} {ours} (log {logged})")
    return f"step {trained.step}: {', '.join(parts) or 'nothing to train on'}"


def _say(line: str) -> None:
    say(line, flush=True)
