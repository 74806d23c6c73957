"""Policy versions in the hive's object store, where each file of a version is an object (R15)."""

import asyncio
from pathlib import Path, PurePath

from bombus.bus import Blobs
from bombus.errors import EngineFault


async def fetch_objects(blobs: Blobs, stem: str, folder: Path, file_name: str) -> None:
    """Copy the objects of the version at `stem` into `folder`, which is created if necessary.

    Raises `EngineFault` if `file_name` is not among them, or `LogCorrupted` or `BusUnavailable`.
    """
    names = await blobs.names(f"{stem}/")
    if f"{stem}/{file_name}" not in names:
        raise EngineFault(f"the object store has no {stem}/{file_name}")
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in names:
        content = await blobs.get(name)
        await asyncio.to_thread(_write, folder / PurePath(name).name, content)


def _write(file: Path, content: bytes) -> None:
    """Write the file completely or not at all, because an existing file is not fetched again."""
    draft = file.with_name(f".{file.name}")
    draft.write_bytes(content)
    draft.replace(file)
