"""Publishes policy versions: full copies, deltas or adapters, in a shared folder or the object store (R15)."""

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path, PurePath
from typing import Self

import msgspec

from bombus.bus import Blobs, Bus
from bombus.bus.streams import blob_stream
from bombus.bus.wire import ReceivedMessage
from bombus.durable import make_durable
from bombus.errors import BombusError, Code, EngineFault, Refused
from bombus.faults import Point, reached
from bombus.hive.events import OBJECTS, Weights, WeightsReady
from bombus.hive.inbox import Answer, Done, Refusal
from bombus.weights.deltas import DELTA_FORMAT, FULL_FILE, chain
from bombus_trainer.backend import TrainerBackend
from bombus_trainer.options import TrainerOptions
from bombus_trainer.publish.directories import epoch_of, remove_others
from bombus_trainer.publish.export import (
    ModelPart,
    VersionTarget,
    WeightsSource,
    complete,
    digest_of,
    export,
    export_adapter,
    export_base,
    export_delta,
)
from bombus_trainer.publish.host_copy import HostCopy
from bombus_trainer.recovery.progress import Kind, advanced, in_thread

log = logging.getLogger(__name__)

OBJECT_BYTES_MAX = 10**9  # size of the largest model that may go through the object store
COPIES = 3  # versions that must fit into the store: the newest two, and the next


class Versions:
    """The versions published in one trainer epoch; each opening of a run has its own `Versions`.

    Each version has a directory in `root`, whether or not replicas read it from there. Within the `async with` block,
    replicas that cannot assemble the newest version from deltas may request a full copy, and their requests are
    answered.
    """

    def __init__(self, bus: Bus, options: TrainerOptions, root: Path, run: int, trainer_epoch: int) -> None:
        self._bus = bus
        self._options = options
        self._root = root
        self._run = run
        self._epoch = trainer_epoch
        self._held = HostCopy()
        self._executor: TrainerBackend | None = None  # the backend that exported the held version
        self._adapter_base: Weights | None = None  # the model under the adapters, once replicas can find it
        self._booted = False  # a version was published or recalled, so requests can be answered
        self._full_until = 0  # no delta is tried before this version, since the last one was too large
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        subject = self._bus.subjects.full_copies(self._options.engine, self._epoch)
        self._subscription = await self._bus.client.subscribe(subject, cb=self._on_request)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._bus.is_connected:
            await self._subscription.unsubscribe()

    @property
    def _stored(self) -> bool:
        return self._options.weights_by == "objects"

    async def check(self, source: WeightsSource) -> None:
        """Raise `EngineFault` if the model is too large for the object store and the trainer publishes there."""
        if not self._stored:
            return
        check_fits(source.outline().bytes, (await self._bus.state(blob_stream(self._bus.subjects))).max_bytes)

    # ---- publishing -------------------------------------------------------------------------------------------

    async def publish(
        self, executor: TrainerBackend, version: int, tokenizer: str, newest: WeightsReady | None
    ) -> Weights:
        """Write a version where replicas look for it. A delta builds on `newest`, the newest version on the log."""
        target = VersionTarget(self._root, version, self._epoch, tokenizer)
        async with self._lock:
            if self._options.weights_lora == "adapter" and executor.settings.config.lora_rank:
                base = self._adapter_base = self._adapter_base or await self._publish_base(executor, newest)
                write = partial(export_adapter, executor, target, base)
            else:
                write = partial(self._write, executor, target, newest)
            weights = await in_thread(Kind.WEIGHTS, f"writing version {version}", write)
            self._booted = True
            return await self._store(weights)

    async def publish_fixed(self, source: WeightsSource, tokenizer: str) -> Weights:
        """Write weights that never change as version 0, as a full copy where replicas look for it."""
        write = partial(export, source, VersionTarget(self._root, 0, self._epoch, tokenizer))
        async with self._lock:
            return await self._store(await in_thread(Kind.WEIGHTS, "writing the base", write))

    async def _publish_base(self, executor: TrainerBackend, newest: WeightsReady | None) -> Weights:
        """Return the model under the adapters. The newest version's base is reused if it exists and has the same
        weights.

        Otherwise, a new base is published.
        """
        published = None if newest is None else newest.weights.adapter_of
        if published is not None and (self._directory(published.where) / FULL_FILE).exists():
            digest = partial(digest_of, executor, part=ModelPart.BASE)
            if await in_thread(Kind.WEIGHTS, "the digest of the model", digest) == published.sha256:
                return published
            log.warning("the model as loaded here is not the base of the run's adapters: publishing a new base")
        write = partial(export_base, executor, self._root, self._epoch)
        return await self._store(await in_thread(Kind.WEIGHTS, "writing the model below the adapters", write))

    def _write(self, executor: TrainerBackend, target: VersionTarget, newest: WeightsReady | None) -> Weights:
        if self._options.full_every == 1:
            self._held = HostCopy()
            return export(executor, target)
        self._executor = executor
        base = self._base(target.version, newest)
        if base is None:
            return export(executor, target, self._held)
        weights = export_delta(executor, target, self._held, base)
        if weights.format != DELTA_FORMAT:
            self._full_until = target.version + self._options.full_every
        return weights

    def _base(self, version: int, newest: WeightsReady | None) -> WeightsReady | None:
        """Return the newest version if its values are held here and its chain has room for another delta."""
        if newest is None or version < self._full_until or not self._holds(newest):
            return None
        return newest if len(self._chain(newest.weights)) < self._options.full_every else None

    def _holds(self, ready: WeightsReady) -> bool:
        return (self._held.version, self._held.sha256) == (ready.version, ready.weights.sha256)

    async def _store(self, weights: Weights) -> Weights:
        """Copy a version into the object store if replicas read it from there. Return its `Weights` for the log.

        With `--durability power`, the version is on the disk when this returns: nobody would write it again once the
        log names it.
        """
        directory = Path(weights.where)
        if not self._stored:
            if self._bus.syncing.needed:
                await in_thread(Kind.WEIGHTS, f"syncing {directory.name}", partial(_make_files_durable, directory))
            return weights
        await self._put(directory, sorted(file.name for file in directory.iterdir()))
        return msgspec.structs.replace(weights, where=f"{OBJECTS}{self._objects}{directory.name}")

    async def _put(self, directory: Path, names: Iterable[str]) -> None:
        for name in names:
            content = await in_thread(Kind.WEIGHTS, f"reading {name}", (directory / name).read_bytes)
            await Blobs(self._bus).put(f"{self._objects}{directory.name}/{name}", content)
            reached(Point.TRAINER_WEIGHTS_STORED)

    @property
    def _objects(self) -> str:
        """The prefix of this run's object names."""
        return f"weights/{self._options.engine}/run-{self._run}/"

    # ---- removal ----------------------------------------------------------------------------------------------

    async def prune(self, named: Iterable[WeightsReady | None]) -> None:
        """Remove every version except `named` and the versions that they build on."""
        links = [link for ready in named if ready is not None for link in self._chain(ready.weights)]
        wheres = [link.where for link in links]
        async with self._lock:  # an unfinished full copy is a draft, which would be removed
            remove = partial(remove_others, self._root, wheres, self._epoch)
            await in_thread(Kind.REMOVAL, "removing old versions", remove)
            if self._stored:
                await self._prune_objects({PurePath(where).name for where in wheres})

    def _chain(self, weights: Weights) -> list[Weights]:
        """Return these weights and all versions that they build on, or only these weights if one of those versions is
        not on this machine."""
        try:
            return chain(weights, self._directory)
        except EngineFault as fault:
            log.info("only the delta of %s is kept: %s", weights.where, fault)
            return [weights]

    def _directory(self, where: str) -> Path:
        """Return our directory for the version that is at `where` on the log."""
        return self._root / PurePath(where).name

    async def _prune_objects(self, kept: set[str]) -> None:
        stem = f"weights/{self._options.engine}/run-"
        for name in await Blobs(self._bus).names(stem):
            run, _, rest = name.removeprefix(stem).partition("/")
            directory = rest.partition("/")[0]
            epoch = epoch_of(directory)
            ours = int(run) == self._run and epoch is not None and epoch <= self._epoch
            if int(run) < self._run or (ours and directory not in kept):
                await Blobs(self._bus).delete(name)

    # ---- full copies on demand --------------------------------------------------------------------------------

    async def recall(self, executor: TrainerBackend, newest: WeightsReady | None) -> None:
        """After a restart, make a host copy of the newest version from `executor`, if it was published as a delta."""
        await self._hold(executor, newest)
        self._booted = True

    async def _hold(self, executor: TrainerBackend, newest: WeightsReady | None) -> None:
        if newest is None or newest.weights.format != DELTA_FORMAT or self._holds(newest):
            return
        async with self._lock:
            self._executor = executor
            digest = partial(digest_of, executor, self._held)
            found = await in_thread(Kind.WEIGHTS, f"the digest of version {newest.version}", digest)
            self._held.settle(newest.version, found)
        if not self._holds(newest):
            log.warning("version %d cannot be reproduced here: its digest would be %s", newest.version, found)
            self._held = HostCopy()

    async def _on_request(self, message: ReceivedMessage) -> None:
        if self._booted:  # a replica that gets no answer repeats its request
            await self._bus.answer(message.reply, await self._give(message.data))

    async def _give(self, requested: bytes) -> Answer:
        """Write the full file of a requested version, which is named by its `where` on the log."""
        where = requested.decode(errors="replace")
        try:
            async with self._lock:
                await self._complete(where)
        except Refused as refused:
            return Refusal(code=refused.code, why=refused.why)
        except (BombusError, OSError) as error:  # the answer tells the replica, which reports it
            log.exception("cannot write a full copy of %s", where)
            return Refusal(code=Code.INTERNAL, why=f"the trainer could not write it: {error}")
        return Done()

    async def _complete(self, where: str) -> None:
        directory, executor = self._directory(where), self._executor
        # Listing the directory also rejects names that are too long for a file.
        is_ours = self._root.is_dir() and directory in self._root.iterdir()
        if not is_ours or not (directory / FULL_FILE).exists():
            version = f"version-{self._held.version:08d}-"
            is_held = bool(self._held.sha256) and directory.name.startswith(version)
            if executor is None or not is_ours or not is_held:
                why = f"the trainer no longer has the weights of {where}, only those of its newest version"
                raise Refused(Code.WRONG_PHASE, why)
            log.warning("writing a full copy of %s, which a replica has asked for", directory)
            write = partial(complete, executor, directory, self._held, self._epoch)
            await in_thread(Kind.WEIGHTS, f"writing a full copy of version {self._held.version}", write)
        if self._stored:
            stem = f"{self._objects}{directory.name}/"
            stored = {name.removeprefix(stem) for name in await Blobs(self._bus).names(stem)}
            await self._put(directory, sorted({file.name for file in directory.iterdir()} - stored))


def check_fits(size: int, room: int) -> None:
    """Raise `EngineFault` if weights of `size` bytes do not fit into an object store of `room` bytes.

    A `room` of 0 or less means no limit.
    """
    if size > OBJECT_BYTES_MAX:
        raise EngineFault(
            f"weights of {size / 1e9:.1f} GB are too large for the object store, which allows up to "
            f"{OBJECT_BYTES_MAX / 1e9:.1f} GB: a shared folder is required (--weights-by folder)"
        )
    if 0 < room < COPIES * size:
        raise EngineFault(
            f"the object store has {room / 1e6:.1f} MB, but must hold {COPIES} versions of {size / 1e6:.1f} MB: "
            "give it more room, or share a folder (--weights-by folder)"
        )


def _make_files_durable(directory: Path) -> None:
    for path in (*directory.iterdir(), directory, directory.parent):  # it was renamed into its parent
        make_durable(path)
        advanced()
