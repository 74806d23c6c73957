"""Policy versions on their way out: full copies, deltas or adapters, in a folder or the object store (R15).

One for each time that a run is opened. It also gives out full copies of the newest version, to replicas that cannot
make theirs of deltas.
"""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path, PurePath
from types import TracebackType
from typing import Self

import msgspec

from bombus.bus import Bus
from bombus.bus.streams import blob_stream
from bombus.bus.wire import ReceivedMessage
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
    complete,
    digest_of,
    export,
    export_adapter,
    export_base,
    export_delta,
)
from bombus_trainer.publish.host_copy import HostCopy

log = logging.getLogger(__name__)

OBJECT_BYTES_MAX = 10**9  # of a model that may travel through the object store
COPIES = 3  # of it that the store has to hold: two versions, and the one that comes


class Versions:
    """What the trainer of one epoch publishes. Below `root` a version has a folder, whether replicas read it or not."""

    def __init__(self, bus: Bus, options: TrainerOptions, root: Path, run: int, trainer_epoch: int) -> None:
        self._bus = bus
        self._options = options
        self._root = root
        self._run = run
        self._epoch = trainer_epoch
        self._held = HostCopy()
        self._executor: TrainerBackend | None = None  # what the held version was exported by
        self._adapter_base: Weights | None = None  # what adapters are on, once it is where replicas look for it
        self._booted = False  # the log's newest version is held, if it ever will be
        self._full_until = 0  # deltas were not worth it: not tried before this version
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Answer requests for full copies until the block ends."""
        subject = self._bus.subjects.full_copies(self._options.engine, self._epoch)
        self._asked = await self._bus.client.subscribe(subject, cb=self._on_asked)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._bus.is_connected:
            await self._asked.unsubscribe()

    @property
    def _stored(self) -> bool:
        return self._options.weights_by == "objects"

    async def check(self, executor: TrainerBackend) -> None:
        """Raises `EngineFault` when this model cannot be published in the way that the trainer was told."""
        if not self._stored:
            return
        check_fits(executor.outline().bytes, (await self._bus.state(blob_stream(self._bus.subjects))).max_bytes)

    # ---- publishing -------------------------------------------------------------------------------------------

    async def publish(
        self, executor: TrainerBackend, version: int, tokenizer: str, newest: WeightsReady | None
    ) -> Weights:
        """Write a version where replicas look for it. `newest` is the log's newest: what a delta may build on."""
        async with self._lock:
            if self._options.weights_lora == "adapter" and executor.settings.config.lora_rank:
                base = self._adapter_base = self._adapter_base or await self._publish_base(executor, newest)
                weights = await asyncio.to_thread(
                    export_adapter, executor, self._root, version, self._epoch, tokenizer, base
                )
            else:
                weights = await asyncio.to_thread(self._write, executor, version, tokenizer, newest)
            self._booted = True
            return await self._store(weights)

    async def _publish_base(self, executor: TrainerBackend, newest: WeightsReady | None) -> Weights:
        """What adapters are on: that of the log's newest version, if it is still there and still ours."""
        known = None if newest is None else newest.weights.adapter_of
        if known is not None and (self._folder(known.where) / FULL_FILE).exists():
            if await asyncio.to_thread(digest_of, executor, part=ModelPart.BASE) == known.sha256:
                return known
            log.warning("the model as loaded here is not what the run's adapters are on: it is published anew")
        return await self._store(await asyncio.to_thread(export_base, executor, self._root, self._epoch))

    def _write(self, executor: TrainerBackend, version: int, tokenizer: str, newest: WeightsReady | None) -> Weights:
        if self._options.full_every == 1:
            self._held = HostCopy()
            return export(executor, self._root, version, self._epoch, tokenizer)
        self._executor = executor
        base = self._base(version, newest)
        if base is None:
            return export(executor, self._root, version, self._epoch, tokenizer, self._held)
        weights = export_delta(executor, self._root, version, self._epoch, tokenizer, self._held, base)
        if weights.format != DELTA_FORMAT:
            self._full_until = version + self._options.full_every
        return weights

    def _base(self, version: int, newest: WeightsReady | None) -> WeightsReady | None:
        """What is held, if it is the log's newest version and may have another delta on top."""
        if newest is None or version < self._full_until or not self._holds(newest):
            return None
        return newest if len(self._chain(newest.weights)) < self._options.full_every else None

    def _holds(self, ready: WeightsReady) -> bool:
        return (self._held.version, self._held.sha256) == (ready.version, ready.weights.sha256)

    async def _store(self, weights: Weights) -> Weights:
        """Into the object store too, if versions go by that."""
        if not self._stored:
            return weights
        place = Path(weights.where)
        await self._put(place, sorted(file.name for file in place.iterdir()))
        return msgspec.structs.replace(weights, where=f"{OBJECTS}{self._objects}{place.name}")

    async def _put(self, place: Path, names: Iterable[str]) -> None:
        for name in names:
            content = await asyncio.to_thread((place / name).read_bytes)
            await self._bus.put_blob(f"{self._objects}{place.name}/{name}", content)
            reached(Point.TRAINER_WEIGHTS_STORED)

    @property
    def _objects(self) -> str:
        """How the names of this run's objects begin."""
        return f"weights/{self._options.engine}/run-{self._run}/"

    # ---- what is kept -----------------------------------------------------------------------------------------

    async def prune(self, named: Iterable[WeightsReady | None]) -> None:
        """Remove what no version of `named` is, or is made of."""
        links = [link for ready in named if ready is not None for link in self._chain(ready.weights)]
        wheres = [link.where for link in links]
        async with self._lock:  # a full copy on its way is in a draft, which would be removed
            await asyncio.to_thread(remove_others, self._root, wheres, self._epoch)
            if self._stored:
                await self._prune_objects({PurePath(where).name for where in wheres})

    def _chain(self, weights: Weights) -> list[Weights]:
        """What a version is made of; of another machine's trainer we do not know it."""
        try:
            return chain(weights, self._folder)
        except EngineFault as fault:
            log.info("of %s only the delta is kept: %s", weights.where, fault)
            return [weights]

    def _folder(self, where: str) -> Path:
        """Where we have what the log calls so."""
        return self._root / PurePath(where).name

    async def _prune_objects(self, kept: set[str]) -> None:
        stem = f"weights/{self._options.engine}/run-"
        for name in await self._bus.blob_names(stem):
            run, _, rest = name.removeprefix(stem).partition("/")
            place = rest.partition("/")[0]
            epoch = epoch_of(place)
            ours = int(run) == self._run and epoch is not None and epoch <= self._epoch
            if int(run) < self._run or (ours and place not in kept):
                await self._bus.delete_blob(name)

    # ---- full copies on demand --------------------------------------------------------------------------------

    async def recall(self, executor: TrainerBackend, newest: WeightsReady | None) -> None:
        """After a restart: hold the log's newest version again, which `executor` has, if it is a delta there."""
        await self._hold(executor, newest)
        self._booted = True

    async def _hold(self, executor: TrainerBackend, newest: WeightsReady | None) -> None:
        if newest is None or newest.weights.format != DELTA_FORMAT or self._holds(newest):
            return
        async with self._lock:
            self._executor = executor
            found = await asyncio.to_thread(digest_of, executor, self._held)
            self._held.settle(newest.version, found)
        if not self._holds(newest):
            log.warning("version %d cannot be made again here: its digest would be %s", newest.version, found)
            self._held = HostCopy()

    async def _on_asked(self, message: ReceivedMessage) -> None:
        if self._booted:  # who gets no answer asks again
            await self._bus.answer(message.reply, await self._give(message.data))

    async def _give(self, asked: bytes) -> Answer:
        """Asked for a place that the log names: its full file is put there."""
        where = asked.decode(errors="replace")
        try:
            async with self._lock:
                await self._complete(where)
        except Refused as refused:
            return Refusal(code=refused.code, why=refused.why)
        except (BombusError, OSError) as error:  # told to the replica, which ends the run with it
            log.exception("no full copy of %s", where)
            return Refusal(code=Code.INTERNAL, why=f"the trainer could not write it: {error}")
        return Done()

    async def _complete(self, where: str) -> None:
        place, executor = self._folder(where), self._executor
        if not (place / FULL_FILE).exists():
            version = f"version-{self._held.version:08d}-"
            if executor is None or not self._held.sha256 or not place.name.startswith(version) or not place.is_dir():
                why = f"the trainer holds no values of {where}: only those of its newest version"
                raise Refused(Code.WRONG_PHASE, why)
            log.warning("writing a full copy of %s, which a replica has asked for", place)
            await asyncio.to_thread(complete, executor, place, self._held, self._epoch)
        if self._stored:
            stem = f"{self._objects}{place.name}/"
            there = {name.removeprefix(stem) for name in await self._bus.blob_names(stem)}
            await self._put(place, sorted({file.name for file in place.iterdir()} - there))


def check_fits(size: int, room: int) -> None:
    """Whether weights of `size` bytes may go by an object store of `room` bytes (0 or less: no limit).

    Raises `EngineFault`.
    """
    if size > OBJECT_BYTES_MAX:
        raise EngineFault(
            f"weights of {size / 1e9:.1f} GB are too large for the object store, which takes up to "
            f"{OBJECT_BYTES_MAX / 1e9:.1f} GB: a shared folder is required (--weights-by folder)"
        )
    if 0 < room < COPIES * size:
        raise EngineFault(
            f"the object store holds {room / 1e6:.1f} MB, and {COPIES} versions of {size / 1e6:.1f} MB have to fit: "
            "give it more room, or share a folder (--weights-by folder)"
        )
