"""`bombus export`: writes a policy version as a folder that transformers, peft and vLLM load."""

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bombus.cli import URL_FILE
from bombus.export.card import CARD, SHARE_SHOWN, card, loading
from bombus.export.finding import Finder, VersionFiles
from bombus.export.folder import drafted
from bombus.export.writing import ExportedFiles, write_adapter, write_whole
from bombus.figures import byte_size
from bombus.replay.logged_run import LoggedRun, read_run
from bombus.replay.opening import add_source_arguments, open_source
from bombus.replay.running import BadUsage, reported
from bombus.replay.source import NotOnLog
from bombus.terminal import complain, say
from bombus.weights.models import SEEDS, loadable_name

PROGRESS_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "version",
        type=int,
        nargs="?",
        metavar="VERSION",
        help="the policy version, which the step of the same number produced (default: the newest)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the folder to make; it appears once it is complete"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier export in DIR")
    parser.add_argument(
        "--merged", action="store_true", help="for a LoRA run, write the whole model with the adapter merged into it"
    )
    parser.add_argument(
        "--float32",
        action="store_true",
        help="with --merged: write float32, which keeps all of the adapter (default: the base model's stored dtypes)",
    )
    parser.add_argument("--engine", metavar="NAME", help="required when the hive has several")
    parser.add_argument("--run", type=int, metavar="R", help="which run of the engine (default: the newest)")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    return reported("bombus export", lambda: _export(arguments))


@dataclass(frozen=True)
class _Found:
    """A version that is on the log, with its files on this machine."""

    hive: str
    run: LoggedRun
    number: int
    files: VersionFiles

    @property
    def base_model(self) -> str:
        """The name or folder from which `from_pretrained` loads the job's model."""
        model = self.run.job.model
        dtype = "bfloat16" if model.dtype == "auto" else model.dtype
        return loadable_name(model.path, dtype, model.seed % SEEDS)


def _export(arguments: argparse.Namespace) -> None:
    out: Path = arguments.out.absolute()
    if arguments.float32 and not arguments.merged:
        raise BadUsage("--float32 requires --merged: an adapter is float32, and a whole model is copied as it is")
    # Files are written outside the event loop: inside it, Ctrl-C would have no effect until all are written.
    with drafted(out, arguments.force) as draft, TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        found = asyncio.run(_find(arguments, Path(scratch)))
        exported = _write(found, draft, arguments)
        text = card(found.hive, found.run, found.number, exported, found.base_model)
        (draft / CARD).write_text(text)
    _tell(found, exported, out)


async def _find(arguments: argparse.Namespace, scratch: Path) -> _Found:
    async with open_source(arguments) as source:
        logged = await read_run(source, arguments.engine, arguments.run)
        if not logged.versions:
            raise NotOnLog(f"run {logged.run} of engine {logged.engine} has no version yet; name another with --run")
        number = max(logged.versions) if arguments.version is None else arguments.version
        finder = Finder(source, scratch, arguments.data or URL_FILE.parent)
        weights = await finder.check(logged, number)
        if arguments.float32 and weights.adapter_of is None:
            raise BadUsage(f"--float32 is for adapters: version {number} was published as a whole model")
        return _Found(source.hive, logged, number, await finder.files(weights, arguments.merged))


def _write(found: _Found, draft: Path, arguments: argparse.Namespace) -> ExportedFiles:
    if found.files.model is None:
        return write_adapter(found.files, draft, found.base_model)
    return write_whole(found.files, draft, CopyReport(), arguments.float32)


def _tell(found: _Found, exported: ExportedFiles, out: Path) -> None:
    size = sum((out / name).stat().st_size for name in exported.digests)
    what = f"an adapter of rank {exported.rank}" if exported.rank else "a whole model"
    say(f"{out}: version {found.number} of engine {found.run.engine}, run {found.run.run}: {what}, {byte_size(size)}")
    if exported.share_lost >= SHARE_SHOWN:
        say(f"  merging rounds away {exported.share_lost:.1%} of what the adapter adds: --float32 keeps all of it")
    for tool, line in loading(exported, str(out), found.base_model):
        say(f"  {tool}: {line}")


class CopyReport:
    """Reports progress every few seconds during a copy that takes that long."""

    def __init__(self, every_s: float = PROGRESS_S) -> None:
        self._every_s = every_s
        self._next = 0.0  # set when the copy begins, after its imports

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._next and now >= self._next:
            complain(f"{byte_size(done)} of {byte_size(total)}")
        if now >= self._next:
            self._next = now + self._every_s
