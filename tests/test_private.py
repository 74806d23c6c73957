"""Folders and files of a hive are for its user alone, also where the umask would let everybody read them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bombus.machine.process import free_port
from bombus.private import private_folder, write_private
from bombus_trainer.data.sample_files import write
from bombus_trainer.publish.directories import access_of, draft_directory, make_durable_directory


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_folder_is_made_for_its_user_alone_and_one_that_exists_is_left(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    assert private_folder(given / "a" / "b") == given / "a" / "b"
    private_folder(given)
    assert [mode(path) for path in (given, given / "a", given / "a" / "b")] == [0o755, 0o700, 0o700]


def test_a_secret_file_is_private_also_in_place_of_a_public_one(tmp_path: Path) -> None:
    path = tmp_path / "nats-url"
    path.write_text("old")
    assert mode(path) == 0o644
    write_private(path, "new")
    assert (path.read_text(), mode(path), os.listdir(tmp_path)) == ("new", 0o600, ["nats-url"])


def test_checkpoints_and_weights_are_as_private_as_the_trainers_folder(tmp_path: Path) -> None:
    closed, opened = private_folder(tmp_path / "closed"), tmp_path / "opened"
    opened.mkdir()
    for folder, access in ((closed, 0o700), (opened, 0o755)):
        root = folder / "weights" / "main" / "run-1"
        make_durable_directory(root)
        assert {mode(path) for path in (root, root.parent, root.parent.parent)} == {access}
        assert access_of(root) == access
        assert mode(draft_directory(root, 1)) == 0o700


def test_a_file_of_samples_is_private(tmp_path: Path) -> None:
    write(tmp_path / "of" / "step-1.pt", 1, [])
    assert (mode(tmp_path / "of"), mode(tmp_path / "of" / "step-1.pt")) == (0o700, 0o600)


@pytest.mark.parametrize("given", [False, True])
def test_what_a_hive_makes_is_private(tmp_path: Path, given: bool) -> None:
    data = tmp_path / "data"
    if given:
        data.mkdir()
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"gateway: {{port: {free_port()}}}\nengines: {{main: {{}}}}\n")
    command = [sys.executable, "-m", "bombus", "up", "--config", str(cluster), "--data-dir", str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as up:
        try:
            assert up.stdout is not None
            assert any(line.startswith(b"ready ") for line in up.stdout)
            assert mode(data) == (0o755 if given else 0o700)
            assert mode(data / "nats") == 0o700
            assert mode(data / "nats-url") == mode(data / "nats" / "nats-server.conf") == 0o600
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)
