"""Find the files of a policy version in the trainer's folder, or in the hive's object store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec

from bombus.bus import Blobs
from bombus.errors import EngineFault
from bombus.hive.decoding import decoded
from bombus.hive.events import Weights
from bombus.replay.logged_run import LoggedRun
from bombus.replay.source import BusSource, NotOnLog, Source
from bombus.weights.adapters import ADAPTER_FILE, ADAPTER_FORMAT
from bombus.weights.deltas import DELTA_FILE, DELTA_FORMAT, FULL_FILE, FULL_FORMAT, deltas_below, file_sha256
from bombus.weights.objects import fetch_objects

FILES = {FULL_FORMAT: FULL_FILE, DELTA_FORMAT: DELTA_FILE, ADAPTER_FORMAT: ADAPTER_FILE}
PLACE_PARTS = 5  # weights/<hive>/<engine>/run-<run>/<version> in a trainer's folder

_texts = msgspec.msgpack.Decoder(dict[str, bytes])


@dataclass(frozen=True)
class VersionFiles:
    """The files of a version on this machine. The digests of `model` and `adapter` must still be checked.

    `model` is the folder of a full copy, to which `deltas` (oldest first) and then `adapter` are applied. It is None if
    only the adapter was requested. `texts` are the tokenizer's files, by name.
    """

    weights: Weights
    texts: Mapping[str, bytes]
    model: Path | None = None
    deltas: Sequence[Path] = ()
    adapter: Path | None = None


class Finder:
    """Finds a hive's versions. Files from the object store are kept in the folder `cache`.

    `data` is the hive's data folder, if known. That folder may have been moved since the log was written.
    """

    def __init__(self, source: Source, cache: Path, data: Path | None = None) -> None:
        self._source = source
        self._cache = cache
        self._data = data

    async def check(self, run: LoggedRun, version: int) -> Weights:
        """Return the weights of a run's version. Raises `NotOnLog`, which lists the existing versions, if that version
        does not exist."""
        ready = run.versions.get(version)
        if ready is not None and await self._is_there(ready.weights):
            return ready.weights
        which = f"engine {run.engine}, run {run.run}"
        if ready is None:
            why = f"there is no version {version} of {which}"
        else:
            why = f"version {version} of {which} is no longer at {ready.weights.where}: a trainer keeps the newest two"
        kept = [number for number, each in sorted(run.versions.items()) if await self._is_there(each.weights)]
        raise NotOnLog(f"{why}; available: {', '.join(map(str, kept)) or 'none'}")

    async def files(self, weights: Weights, whole: bool) -> VersionFiles:
        """Return the files of a version. An adapter comes with its base model only if `whole` is true.

        Raises `EngineFault` if files are missing or a delta differs from the one on the log. Also raises `LogCorrupted`
        and `BusUnavailable`.
        """
        texts = await self._texts(weights.tokenizer)
        if weights.adapter_of is not None:
            model = await self._folder(weights.adapter_of) if whole else None
            return VersionFiles(weights, texts, model, adapter=await self._folder(weights))
        if weights.format == FULL_FORMAT:
            return VersionFiles(weights, texts, await self._folder(weights))
        if weights.format != DELTA_FORMAT:
            raise EngineFault(f"this version of bombus does not know the weights format {weights.format!r}")
        deltas, base = await deltas_below(await self._delta(weights), self._delta)
        return VersionFiles(weights, texts, await self._folder(base), deltas)

    async def _texts(self, tokenizer: str) -> dict[str, bytes]:
        try:
            return decoded(_texts.decode, await self._source.blob(tokenizer))
        except msgspec.MsgspecError as error:
            raise EngineFault(f"the object {tokenizer} is not a tokenizer: {error}") from error

    async def _is_there(self, weights: Weights) -> bool:
        file = FILES.get(weights.format, FULL_FILE)
        if not weights.objects:
            return (self._place(weights) / file).is_file()
        return f"{weights.objects}/{file}" in await self._blobs().names(f"{weights.objects}/")

    async def _folder(self, weights: Weights) -> Path:
        if not weights.objects:
            return self._place(weights)
        folder = self._cache / PurePath(weights.objects).name
        if not folder.exists():
            await fetch_objects(self._blobs(), weights.objects, folder, FILES[weights.format])
        return folder

    async def _delta(self, weights: Weights) -> Path:
        path = await self._folder(weights) / DELTA_FILE
        if file_sha256(path) != weights.delta_sha256:
            raise EngineFault(
                f"{path} does not have the sha256 recorded in the log: it is damaged, or has been replaced"
            )
        return path

    def _place(self, weights: Weights) -> Path:
        """Return the folder that the log names or, if that folder is gone, the same place below the known data
        folder."""
        place = Path(weights.where)
        if self._data is not None and not place.is_dir():
            return self._data.joinpath("engines", *place.parts[-PLACE_PARTS:])
        return place

    def _blobs(self) -> Blobs:
        if not isinstance(self._source, BusSource):
            raise NotOnLog(f"{self._source.title} has no weights: name the hive with --nats or --data")
        return Blobs(self._source.bus)
