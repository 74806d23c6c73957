"""Where the files of a version are found: where the log says, or in a data folder that has been moved."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bombus.export.finding import Finder
from bombus.hive.events import OBJECTS
from bombus.replay.archive import FileSource
from bombus.replay.logged_run import LoggedRun, read_run
from bombus.replay.source import NotOnLog
from bombus.weights.deltas import FULL_FILE
from tests.logs.facts import TINY


@pytest.fixture
def archive() -> Iterator[FileSource]:
    with FileSource.open(TINY) as source:
        yield source


def stored_at(run: LoggedRun, version: int, where: str) -> LoggedRun:
    ready = run.versions[version]
    moved = msgspec.structs.replace(ready, weights=msgspec.structs.replace(ready.weights, where=where))
    return msgspec.structs.replace(run, versions={**run.versions, version: moved})


def place_below(folder: Path, version: int) -> Path:
    place = folder / "engines/weights/main/main/run-1" / f"version-{version:08d}-epoch-1"
    place.mkdir(parents=True)
    (place / FULL_FILE).touch()
    return place


async def test_a_data_folder_that_was_moved_still_has_its_versions(archive: FileSource, tmp_path: Path) -> None:
    place = place_below(tmp_path / "before", 2)
    run = stored_at(await read_run(archive, run=1), 2, str(place))
    (tmp_path / "before").rename(tmp_path / "after")
    finder = Finder(archive, tmp_path / "cache", tmp_path / "after")
    weights = await finder.check(run, 2)
    files = await finder.files(weights, whole=False)
    assert files.model == tmp_path / "after" / place.relative_to(tmp_path / "before")
    assert "tokenizer.json" in files.texts
    with pytest.raises(NotOnLog, match=r"is no longer at .*; available: none"):
        await Finder(archive, tmp_path / "cache").check(run, 2)


async def test_an_archive_has_no_weights_of_the_object_store(archive: FileSource, tmp_path: Path) -> None:
    run = stored_at(await read_run(archive, run=1), 2, f"{OBJECTS}weights/main/run-1/version-00000002-epoch-1")
    with pytest.raises(NotOnLog, match="has no weights: name the hive with --nats or --data"):
        await Finder(archive, tmp_path / "cache").check(run, 2)
