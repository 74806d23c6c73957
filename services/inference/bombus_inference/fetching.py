"""What `weights.ready` names becomes a local folder: fetched, put together from deltas, and checked against the log.

The folder that is returned is whole, in Hugging Face layout, and is not changed afterwards. See docs/weights.md.
"""

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath

from bombus.bus import Blobs, Bus
from bombus.errors import BusUnavailable, EngineFault, LogCorrupted
from bombus.hive.events import Weights, WeightsReady
from bombus.hive.inbox import Refusal, decode_answer
from bombus.weights.adapters import ADAPTER_FILE, ADAPTER_FORMAT
from bombus.weights.deltas import (
    CHAIN_MAX,
    DELTA_FILE,
    DELTA_FORMAT,
    FULL_FILE,
    FULL_FORMAT,
    DeltaFile,
    copy_beside,
    file_sha256,
    rebuild,
)

log = logging.getLogger(__name__)

FULL_COPY_S = 600.0  # how long a trainer may take to write one
ASK_S = 20.0
_CACHES = "bombus-weights-"
_LOCK = "lock"


@dataclass(frozen=True)
class Fetched:
    """A version in `folder`. `delta` is the file that makes it of version `base`, where it came as one.

    With an `adapter` the version is that, on top of the model in `folder`.
    """

    folder: Path
    delta: Path | None = None
    base: int = -1
    adapter: Path | None = None


class Fetcher:
    """One replica's. Keeps the newest version's files, in a folder of its own where they are not the trainer's.

    With `adapters` these are handed on as they come; else they are merged into the model that they are on.
    """

    def __init__(self, bus: Bus, engine: str, cache: Path | None = None, adapters: bool = False) -> None:
        self._bus = bus
        self._engine = engine
        self._adapters = adapters
        self._adapter_base: Weights | None = None  # what adapters are on, once it was checked
        self._root = cache or Path(tempfile.gettempdir())
        self._cache: Path | None = None
        self._lock = -1
        self._have: WeightsReady | None = None  # what lies in _folder, checked
        self._folder = Path()

    async def materialise(self, ready: WeightsReady, trainer_epoch: Callable[[], int]) -> Fetched:
        """The version that `ready` names, whole and with the digest that the log says.

        Raises `EngineFault` when it cannot be had, nor a full copy of it from the run's trainer, whichever that is.
        """
        weights = ready.weights
        if weights.format == ADAPTER_FORMAT and weights.adapter_of is not None:
            return self._keep(ready, await self._with_adapter(ready, weights.adapter_of))
        if weights.format not in (FULL_FORMAT, DELTA_FORMAT):
            raise EngineFault(f"weights of format {weights.format!r} are not known to this engine")
        if weights.format == FULL_FORMAT:
            return self._keep(ready, Fetched(await self._checked(weights, FULL_FILE)))
        if self._have == ready and self._folder.is_dir():  # it was put together, and could not be loaded
            return Fetched(self._folder)
        try:
            fetched = await self._from_delta(ready)
        except (EngineFault, OSError) as fault:
            log.warning("version %d: %s; asking for a full copy", ready.version, fault, extra={"run": ready.run})
            await self._ask_full_copy(weights, trainer_epoch, str(fault))
            fetched = Fetched(await self._checked(weights, FULL_FILE))
        return self._keep(ready, fetched)

    def close(self) -> None:
        """Remove what was fetched."""
        self._have = None
        if self._cache is not None:
            shutil.rmtree(self._cache, ignore_errors=True)
            os.close(self._lock)
            self._cache = None

    # ---- full copies ------------------------------------------------------------------------------------------

    async def _checked(self, weights: Weights, name: str) -> Path:
        """The folder of weights that travel as the file `name`, once that is what the log says."""
        folder = await self._local(weights, name)
        try:
            found = await asyncio.to_thread(file_sha256, folder / name)
        except OSError as error:
            raise EngineFault(
                f"no weights at {weights.where}: {error}; replicas must see the trainer's folder, or the trainer "
                "has to be told --weights-by objects"
            ) from error
        if weights.sha256 and found != weights.sha256:
            self._discard(weights, folder)
            raise EngineFault(f"{folder / name} has sha256 {found}, the log says {weights.sha256}: not loaded")
        return folder

    async def _ask_full_copy(self, weights: Weights, trainer_epoch: Callable[[], int], why: str) -> None:
        """Asked again and again: a trainer answers when it is through, and one that died may be started again."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FULL_COPY_S
        while True:
            subject = self._bus.subjects.full_copies(self._engine, trainer_epoch())
            try:
                reply = await self._bus.requests.request(subject, weights.where.encode(), ASK_S)
                break
            except BusUnavailable as error:
                if loop.time() > deadline:
                    raise EngineFault(f"{why}; and the trainer gives no full copy: {error}") from error
        answer = decode_answer(reply.data)
        if isinstance(answer, Refusal):
            raise EngineFault(f"{why}; and no full copy can be had: {answer.why}")

    # ---- deltas -----------------------------------------------------------------------------------------------

    async def _from_delta(self, ready: WeightsReady) -> Fetched:
        """On top of what is here, if that is the delta's base; else from the last full copy through all deltas."""
        weights, have = ready.weights, self._have
        newest = await self._delta(weights)
        deltas = [newest]
        with DeltaFile(newest) as file:
            base = file.base()
        if have is None or (have.run, have.weights.sha256) != (ready.run, base.sha256) or not self._folder.is_dir():
            have = None
            while base.format == DELTA_FORMAT:
                if len(deltas) > CHAIN_MAX:
                    raise EngineFault(f"{weights.where} is made of more than {CHAIN_MAX} deltas")
                deltas.append(await self._delta(base))
                with DeltaFile(deltas[-1]) as file:
                    base = file.base()
        beneath = self._folder if have is not None else await self._local(base, FULL_FILE)
        into = self._vacant(ready)
        found = await asyncio.to_thread(_put_together, beneath, deltas[::-1], into)
        if found != weights.sha256:
            raise EngineFault(f"version {ready.version} made of deltas has sha256 {found}, not {weights.sha256}")
        return Fetched(into, newest if have is not None else None, weights.base)

    async def _delta(self, weights: Weights) -> Path:
        """A delta's file, as the log, or the delta on top of it, says that it is."""
        path = await self._local(weights, DELTA_FILE) / DELTA_FILE
        found = await asyncio.to_thread(file_sha256, path)
        if found != weights.delta_sha256:
            self._discard(weights, path.parent)
            raise EngineFault(f"{path} has sha256 {found}, not {weights.delta_sha256}")
        return path

    # ---- adapters ---------------------------------------------------------------------------------------------

    async def _with_adapter(self, ready: WeightsReady, base: Weights) -> Fetched:
        """An adapter and what it is on, which is the same for all versions and therefore read through only once."""
        beneath = await (self._local if self._adapter_base == base else self._checked)(base, FULL_FILE)
        self._adapter_base = base
        adapter = await self._checked(ready.weights, ADAPTER_FILE)
        if self._adapters:
            return Fetched(beneath, adapter=adapter)
        into = self._vacant(ready)
        from bombus.weights.merging import merge_files  # of those that fetch, few need torch

        await asyncio.to_thread(merge_files, beneath, adapter, into)
        return Fetched(into)

    # ---- where things lie -------------------------------------------------------------------------------------

    def _keep(self, ready: WeightsReady, fetched: Fetched) -> Fetched:
        """This version is what we have from now on; of older ones nothing is kept, unless an engine has mapped it."""
        self._have, self._folder = ready, fetched.folder
        if self._cache is not None:
            kept = {fetched.folder, fetched.adapter, fetched.delta.parent if fetched.delta is not None else None}
            if ready.weights.adapter_of is not None:
                kept.add(self._cache / PurePath(ready.weights.adapter_of.where).name)
            for place in self._cache.iterdir():
                if place.is_dir() and place not in kept:
                    shutil.rmtree(place, ignore_errors=True)
        return fetched

    async def _local(self, weights: Weights, wanted: str) -> Path:
        """The folder that holds the file `wanted` of a version: the trainer's, or ours, its objects fetched."""
        if not weights.objects:
            return Path(weights.where)
        folder = self._own() / PurePath(weights.objects).name
        if not (folder / wanted).exists():
            await self._fetch(weights.objects, folder, wanted)
        return folder

    async def _fetch(self, stem: str, folder: Path, wanted: str) -> None:
        """However long the bus is away."""
        while True:
            try:
                names = await Blobs(self._bus).names(f"{stem}/")
                if f"{stem}/{wanted}" not in names:
                    raise EngineFault(f"the object store has no {stem}/{wanted}")
                folder.mkdir(exist_ok=True)
                for name in names:
                    content = await Blobs(self._bus).get(name)
                    await asyncio.to_thread(_write, folder / PurePath(name).name, content)
                return
            except LogCorrupted as error:
                raise EngineFault(str(error)) from error
            except BusUnavailable as error:
                log.warning("weights wait for the bus: %s", error)

    def _discard(self, weights: Weights, folder: Path) -> None:
        """What was fetched and is wrong is fetched again next time."""
        if weights.objects:
            shutil.rmtree(folder, ignore_errors=True)

    def _vacant(self, ready: WeightsReady) -> Path:
        """Where a version is put together. What an attempt before has left there is gone."""
        into = self._own() / f"run-{ready.run}-version-{ready.version}"
        shutil.rmtree(into, ignore_errors=True)
        return into

    def _own(self) -> Path:
        """A folder of this process. What processes that were killed have left is removed first."""
        if self._cache is None:
            self._root.mkdir(parents=True, exist_ok=True)
            _remove_orphans(self._root)
            draft = Path(tempfile.mkdtemp(prefix=f".{_CACHES}", dir=self._root))  # no orphan before it is locked
            self._lock = os.open(draft / _LOCK, os.O_CREAT | os.O_RDWR)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._cache = draft.rename(self._root / draft.name.removeprefix("."))
        return self._cache


def _put_together(beneath: Path, deltas: list[Path], into: Path) -> str:
    copy_beside(beneath, into)
    return rebuild(beneath / FULL_FILE, deltas, into / FULL_FILE)


def _write(file: Path, content: bytes) -> None:
    """Whole or not there: what is there is not fetched again."""
    draft = file.with_name(f".{file.name}")
    draft.write_bytes(content)
    draft.replace(file)


def _remove_orphans(root: Path) -> None:
    for place in root.glob(f"{_CACHES}*"):
        try:
            lock = os.open(place / _LOCK, os.O_RDWR)
        except OSError:  # being made, or not ours to remove
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
