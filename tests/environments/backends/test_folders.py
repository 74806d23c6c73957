"""Folders of backends: removed whatever is in them, and whatever became of the server."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import pytest

from bombus.environments.backends.folders import BackendFolder, FolderUse, empty_folder, remove_left_folders, use_of
from tests.patience import PATIENCE_S

SERVER = """
import sys
from bombus.environments.backends.folders import BackendFolder
folder = BackendFolder("shell")
print(folder.path, flush=True)
sys.stdin.read()
"""


def make_deep(folder: str, levels: int = 1200) -> None:
    """Make folders in each other, too deep for Python's own functions that walk them."""
    before = os.getcwd()
    try:
        os.chdir(folder)
        for _ in range(levels):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(before)


async def test_a_folder_is_removed_however_deep_it_is() -> None:
    folder = BackendFolder("test")
    make_deep(folder.path)
    await folder.remove()
    assert not os.path.exists(folder.path)


async def test_a_folder_is_emptied_whatever_the_permissions_in_it(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "a" / "b").mkdir(parents=True)
    make_deep(str(work))
    for each in (work / "a" / "b", work / "a", work):
        each.chmod(0)
    await empty_folder(str(work))
    assert os.listdir(work) == []


async def test_what_a_folder_takes_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(3 << 20))
    assert (await use_of(str(tmp_path))).megabytes in (3, 4)
    assert (await use_of(str(tmp_path))).files == 2
    assert (await use_of(str(tmp_path / "nowhere"))) == FolderUse(0, 0)


async def test_folders_of_a_server_that_was_killed_are_removed_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "bombus-backend-somebody").mkdir()
    own = BackendFolder("shell")
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SERVER,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert server.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        left = (await server.stdout.readline()).decode().strip()
    assert await remove_left_folders() == 0, "its server is alive"
    server.kill()
    await server.wait()
    assert await remove_left_folders() == 1
    assert not os.path.exists(left)
    assert sorted(os.listdir(tmp_path)) == sorted(["bombus-backend-somebody", os.path.basename(own.path)])
    await own.remove()
