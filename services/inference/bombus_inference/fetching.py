"""Builds a local folder with the weights that `weights.ready` names: fetches them, applies deltas, checks the digest.

The resulting folder is complete, in Hugging Face layout, and does not change afterwards. See docs/weights.md.
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

import msgspec

from bombus.bus import Blobs, Bus
from bombus.errors import BusUnavailable, EngineFault, LogCorrupted
from bombus.hive.events import Weights, WeightsReady
from bombus.hive.inbox import Refusal, decode_answer
from bombus.private import private_folder
from bombus.weights.adapters import ADAPTER_FILE, ADAPTER_FORMAT
from bombus.weights.deltas import (
    DELTA_FILE,
    DELTA_FORMAT,
    FULL_FILE,
    FULL_FORMAT,
    DeltaFile,
    copy_companions,
    deltas_below,
    file_sha256,
    rebuild,
)
from bombus.weights.objects import fetch_objects

log = logging.getLogger(__name__)

FULL_COPY_S = 600.0  # how long a trainer may take to write a full copy
REQUEST_S = 20.0
_CACHES = "bombus-weights-"
_LOCK = "lock"


@dataclass(frozen=True)
class FetchedWeights:
    """A version in `folder`. If it was published as a delta, `delta` is the file that turns version `base` into this
    one.

    With an `adapter`, the version is that adapter on top of the model in `folder`.
    """

    folder: Path
    delta: Path | None = None
    base: int = -1
    adapter: Path | None = None


class Fetcher:
    """Fetches one replica's weights. Files that are not in the trainer's folder are fetched into a cache, which keeps
    only the newest version.

    If `adapters` is true, adapters are passed on as they are; otherwise they are merged into their base model.
    """

    def __init__(self, bus: Bus, engine: str, cache: Path | None = None, adapters: bool = False) -> None:
        self._bus = bus
        self._engine = engine
        self._adapters = adapters
        self._adapter_base: Weights | None = None  # the base model of adapters, after its digest was checked
        self._root = cache or Path(tempfile.gettempdir())
        self._cache: Path | None = None
        self._lock = -1
        self._current: WeightsReady | None = None  # the version in _folder, after its digest was checked
        self._folder = Path()

    async def materialise(self, ready: WeightsReady, trainer_epoch: Callable[[], int]) -> FetchedWeights:
        """Return the version that `ready` names, complete and checked against the digest in the log.

        If a delta cannot be used, a full copy is requested from the run's trainer, whose epoch is `trainer_epoch()`.
        Raises `EngineFault` if no full copy is available either.
        """
        weights = ready.weights
        if weights.format == ADAPTER_FORMAT and weights.adapter_of is not None:
            return self._keep(ready, await self._with_adapter(ready, weights.adapter_of))
        if weights.format not in (FULL_FORMAT, DELTA_FORMAT):
            raise EngineFault(f"this engine does not know the weights format {weights.format!r}")
        if weights.format == FULL_FORMAT:
            return self._keep(ready, FetchedWeights(await self._checked(weights, FULL_FILE)))
        if self._current == ready and self._folder.is_dir():  # the version is complete, but loading it failed
            return FetchedWeights(self._folder)
        try:
            fetched = await self._from_delta(ready)
        except (EngineFault, OSError) as fault:
            log.warning("version %d: %s; requesting a full copy", ready.version, fault, extra={"run": ready.run})
            await self._request_full_copy(weights, trainer_epoch, str(fault))
            fetched = FetchedWeights(await self._checked(weights, FULL_FILE))
        return self._keep(ready, fetched)

    def close(self) -> None:
        """Remove the cache."""
        self._current = None
        if self._cache is not None:
            shutil.rmtree(self._cache, ignore_errors=True)
            os.close(self._lock)
            self._cache = None

    # ---- full copies ------------------------------------------------------------------------------------------

    async def _checked(self, weights: Weights, name: str) -> Path:
        """Return the folder with the weights file `name`, after checking the file's digest against the log."""
        folder = await self._local(weights, name)
        try:
            found = await asyncio.to_thread(file_sha256, folder / name)
        except OSError as error:
            raise EngineFault(
                f"no weights at {weights.where}: {error}; replicas must see the trainer's folder, or the trainer must "
                "be started with --weights-by objects"
            ) from error
        if weights.sha256 and found != weights.sha256:
            self._discard(weights, folder)
            raise EngineFault(f"{folder / name} has sha256 {found}, but the log says {weights.sha256}: not loaded")
        return folder

    async def _request_full_copy(self, weights: Weights, trainer_epoch: Callable[[], int], why: str) -> None:
        """Have the trainer write a full copy. Raises `EngineFault` if the trainer does not write one.

        The request is repeated because a trainer does not answer until it has finished writing, and because a trainer
        that has died meanwhile may have been restarted.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FULL_COPY_S
        while True:
            subject = self._bus.subjects.full_copies(self._engine, trainer_epoch())
            try:
                answer = decode_answer(
                    (await self._bus.requests.request(subject, weights.where.encode(), REQUEST_S)).data
                )
                break
            except (BusUnavailable, msgspec.MsgspecError) as error:
                if loop.time() > deadline:
                    raise EngineFault(f"{why}; and the trainer sent no full copy: {error}") from error
        if isinstance(answer, Refusal):
            raise EngineFault(f"{why}; and no full copy is available: {answer.why}")

    # ---- deltas -----------------------------------------------------------------------------------------------

    async def _from_delta(self, ready: WeightsReady) -> FetchedWeights:
        """Apply the delta to the current version if that is the delta's base; otherwise apply all deltas since the last
        full copy."""
        weights, current = ready.weights, self._current
        newest = await self._delta(weights)
        deltas = [newest]
        with DeltaFile(newest) as file:
            base = file.base()
        is_base = current is not None and (current.run, current.weights.sha256) == (ready.run, base.sha256)
        on_current = is_base and self._folder.is_dir()
        if not on_current:
            deltas, base = await deltas_below(newest, self._delta)
        base_folder = self._folder if on_current else await self._local(base, FULL_FILE)
        into = self._empty_folder(ready)
        found = await asyncio.to_thread(_build, base_folder, deltas, into)
        if found != weights.sha256:
            raise EngineFault(f"version {ready.version} built from deltas has sha256 {found}, not {weights.sha256}")
        return FetchedWeights(into, newest if on_current else None, weights.base)

    async def _delta(self, weights: Weights) -> Path:
        """Return a delta's file, checked against its digest, which is in the log or in the next delta."""
        path = await self._local(weights, DELTA_FILE) / DELTA_FILE
        found = await asyncio.to_thread(file_sha256, path)
        if found != weights.delta_sha256:
            self._discard(weights, path.parent)
            raise EngineFault(f"{path} has sha256 {found}, not {weights.delta_sha256}")
        return path

    # ---- adapters ---------------------------------------------------------------------------------------------

    async def _with_adapter(self, ready: WeightsReady, base: Weights) -> FetchedWeights:
        """Return an adapter on its base model, which is checked only once because all versions share it."""
        base_folder = await (self._local if self._adapter_base == base else self._checked)(base, FULL_FILE)
        self._adapter_base = base
        adapter = await self._checked(ready.weights, ADAPTER_FILE)
        if self._adapters:
            return FetchedWeights(base_folder, adapter=adapter)
        into = self._empty_folder(ready)
        from bombus.weights.merging import merge_files  # only this case needs torch

        await asyncio.to_thread(merge_files, base_folder, adapter, into)
        return FetchedWeights(into)

    # ---- folders ----------------------------------------------------------------------------------------------

    def _keep(self, ready: WeightsReady, fetched: FetchedWeights) -> FetchedWeights:
        """Make this the current version and remove older versions from the cache. Mapped files stay readable."""
        self._current, self._folder = ready, fetched.folder
        if self._cache is not None:
            kept = {fetched.folder, fetched.adapter, fetched.delta.parent if fetched.delta is not None else None}
            if ready.weights.adapter_of is not None:
                kept.add(self._cache / PurePath(ready.weights.adapter_of.where).name)
            for place in self._cache.iterdir():
                if place.is_dir() and place not in kept:
                    shutil.rmtree(place, ignore_errors=True)
        return fetched

    async def _local(self, weights: Weights, file_name: str) -> Path:
        """Return the folder that contains a file of a version: the trainer's, or our own after fetching the version's
        objects."""
        if not weights.objects:
            return Path(weights.where)
        folder = self._cache_folder() / PurePath(weights.objects).name
        if not (folder / file_name).exists():
            await self._fetch(weights.objects, folder, file_name)
        return folder

    async def _fetch(self, stem: str, folder: Path, file_name: str) -> None:
        """Fetch a version's objects, waiting for the bus while it is unavailable."""
        while True:
            try:
                return await fetch_objects(Blobs(self._bus), stem, folder, file_name)
            except LogCorrupted as error:
                raise EngineFault(str(error)) from error
            except BusUnavailable as error:
                log.warning("waiting for the bus to fetch weights: %s", error)

    def _discard(self, weights: Weights, folder: Path) -> None:
        """Remove fetched weights that turned out to be wrong, so that they are fetched again next time."""
        if weights.objects:
            shutil.rmtree(folder, ignore_errors=True)

    def _empty_folder(self, ready: WeightsReady) -> Path:
        """Return the folder to build a version in, after removing whatever an earlier attempt left there."""
        into = self._cache_folder() / f"run-{ready.run}-version-{ready.version}"
        shutil.rmtree(into, ignore_errors=True)
        return into

    def _cache_folder(self) -> Path:
        """Return this process's cache. Before creating it, remove the caches of processes that were killed."""
        if self._cache is None:
            private_folder(self._root)
            _remove_orphans(self._root)
            draft = Path(tempfile.mkdtemp(prefix=f".{_CACHES}", dir=self._root))  # not an orphan until locked
            self._lock = os.open(draft / _LOCK, os.O_CREAT | os.O_RDWR)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._cache = draft.rename(self._root / draft.name.removeprefix("."))
        return self._cache


def _build(base_folder: Path, deltas: list[Path], into: Path) -> str:
    copy_companions(base_folder, into)
    return rebuild(base_folder / FULL_FILE, deltas, into / FULL_FILE)


def _remove_orphans(root: Path) -> None:
    for place in root.glob(f"{_CACHES}*"):
        try:
            lock = os.open(place / _LOCK, os.O_RDWR)
        except OSError:  # another process is just creating this cache, or we may not access it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
