"""Checkpoint downloads: links that need no key, and the files that they lead to, one by one or as one tar."""

import asyncio
import re
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.operations.state import KeptWeights
from bombus.hive.state import EngineState
from bombus.weights.checkpoints import CheckpointDamaged, CheckpointLost, read_checkpoint
from bombus_gateway.access import NOBODY
from bombus_gateway.keys import Keys
from bombus_gateway.operations.listings import found_checkpoint, path_of
from bombus_gateway.operations_wire.paths import path_of_operation

LINK_S = 3600.0
OPEN_MAX = 16  # maximum number of concurrent downloads per engine and gateway
CHUNK_BYTES = 4 << 20
FILES_MAX = 10_000
ARCHIVE = "archive.tar"  # used instead of a file's name for the whole checkpoint
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\Z")


class DownloadLink(msgspec.Struct, frozen=True, array_like=True):
    """What a link permits: reading a checkpoint, until the link expires, as long as the checkpoint's weights have this
    `address`."""

    engine: str
    checkpoint: str
    address: str
    expires_ns: int


_links = msgspec.msgpack.Decoder(DownloadLink)


class Downloads:
    """The downloads of one engine. `keys` sign the links, so any of the hive's gateways can serve them."""

    def __init__(self, keys: Keys, engine: str) -> None:
        self._keys = keys
        self._engine = engine
        self._open = 0

    def link(self, kept: KeptWeights, expires_ns: int) -> str:
        """Return a signed link to a checkpoint, for use in the path of `/api/v1/downloads/{link}/{file}`."""
        link = DownloadLink(self._engine, str(path_of(kept)), kept.noted.saved.address, expires_ns)
        return self._keys.sign_link(msgspec.msgpack.encode(link))

    def linked(self, engine: EngineState, token: str, now_ns: int) -> KeptWeights:
        """Return the checkpoint that a link leads to. Raises `Refused` if the link is invalid or the checkpoint is
        gone."""
        link = _links.decode(self._keys.linked(token))
        if link.engine != self._engine:
            raise Refused(Code.UNKNOWN_PATH, f"This link is to a checkpoint of engine {link.engine}: use it there.")
        if now_ns >= link.expires_ns:
            raise Refused(Code.KEY_EXPIRED, f"This link was valid for {LINK_S / 60:.0f} minutes: ask for another one.")
        kept = found_checkpoint(engine.clients, path_of_operation(link.checkpoint), NOBODY.name)
        if kept.noted.saved.address != link.address:
            raise Refused(
                Code.UNKNOWN_PATH, f"{path_of(kept).id} was saved again since this link was made: ask for another one."
            )
        return kept

    @contextmanager
    def room(self) -> Iterator[None]:
        """Count a download while it is open. Raises `Refused` OVERLOADED if too many are open."""
        if self._open >= OPEN_MAX:
            raise Refused(
                Code.OVERLOADED, f"{self._open} downloads are open here (limit {OPEN_MAX}): try again in a moment."
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


def files_of(kept: KeptWeights) -> dict[str, Path]:
    """Return the files of a checkpoint by name. Raises `Refused` if they cannot be read on this machine."""
    folder = Path(kept.noted.saved.folder)
    try:
        files = read_checkpoint(folder, msgspec.Raw).files
    except CheckpointDamaged as error:
        raise Refused(Code.INTERNAL, str(error)) from error
    except CheckpointLost as error:
        raise Refused(
            Code.UNSUPPORTED,
            f"{path_of(kept).id} is in {folder} on its trainer's machine, but this gateway cannot see that folder: "
            "share the folder between them, or ask a gateway on that machine.",
        ) from error
    named = {name: folder / name for name in sorted(files)[:FILES_MAX] if _FILE.match(name)}
    return {name: path for name, path in named.items() if path.is_file() and not path.is_symlink()}


class Archive:
    """A tar file of a checkpoint's files. All files are opened at the start, so they stay readable even if removed or
    replaced."""

    def __init__(self, files: dict[str, Path], folder: str) -> None:
        """Open the files, which are in `folder` within the tar. Raises `OSError`."""
        self._parts: list[tuple[bytes, BinaryIO, int]] = []
        with ExitStack() as stack:
            for name, path in files.items():
                file = stack.enter_context(path.open("rb"))
                info = tarfile.TarInfo(f"{folder}/{name}")
                info.size, info.mtime, info.mode = path.stat().st_size, int(path.stat().st_mtime), 0o644
                self._parts.append((info.tobuf(tarfile.PAX_FORMAT), file, info.size))
            self._closing = stack.pop_all()

    @property
    def size(self) -> int:
        """The tar's size in bytes. Each file has a header and is padded to whole blocks; two blocks end the tar."""
        return sum(len(head) + _filled(size) for head, _, size in self._parts) + 2 * tarfile.BLOCKSIZE

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the tar. Raises `OSError` if a file cannot be read; the receiver then gets fewer than
        `size` bytes."""
        for head, file, size in self._parts:
            yield head
            left = size
            while left:
                chunk = await asyncio.to_thread(file.read, min(CHUNK_BYTES, left))
                if not chunk:
                    raise OSError(f"a file of a checkpoint became {left} bytes shorter while it was being read")
                left -= len(chunk)
                yield chunk
            yield bytes(_filled(size) - size)
        yield bytes(2 * tarfile.BLOCKSIZE)

    def close(self) -> None:
        self._closing.close()


def _filled(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
