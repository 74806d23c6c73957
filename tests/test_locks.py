"""The lock files of `make setup`: everything is pinned, and nothing without a hash is installed."""

import re
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.lock import ALONE, BUILD, LOCKS, entries

ROOT = Path(__file__).parent.parent
LOCKED = {name: entries((LOCKS / f"{name}.txt").read_text()) for name in ("build", "all", "cpu", "cuda")}


def needed(package: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> None:
    """Add the packages that this one needs on this machine, as they are installed here, and what those need."""
    if (package, extras) in seen:
        return
    seen.add((package, extras))
    for line in requires(package) or ():
        need = Requirement(line)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            needed(canonicalize_name(need.name), frozenset(need.extras), seen)


def test_the_locks_have_all_that_bombus_and_its_tests_need() -> None:
    seen: set[tuple[str, frozenset[str]]] = set()
    needed("bombus", frozenset({"dev"}), seen)
    locked = {canonicalize_name(name) for names in LOCKED.values() for name in names}
    assert {name for name, _ in seen} - {"bombus"} <= locked
    assert {ALONE, *BUILD} <= locked


def test_each_entry_has_a_version_and_hashes() -> None:
    for name in LOCKED:
        text = (LOCKS / f"{name}.txt").read_text()
        lines = [line for line in text.splitlines() if line and not line.startswith(("#", " ", "--"))]
        assert all(re.match(r"[a-z0-9._-]+==[^ ]+ .*\\$", line) for line in lines)
        assert sum(entry.count("==") for entry in LOCKED[name].values()) >= len(lines)
        assert all("--hash=sha256:" in entry for entry in LOCKED[name].values())


def test_the_locks_have_the_versions_of_the_constraints() -> None:
    wanted = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            wanted[canonicalize_name(name)] = version
    for names in LOCKED.values():
        for name, entry in names.items():
            version = wanted.get(canonicalize_name(name), "")
            assert f"=={version}" in entry, "run `python -m tests.lock`"


def test_make_setup_installs_nothing_without_a_hash() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("$(STAMP):")[2].partition("\n\n")[0]
    installing = [line for line in recipe.splitlines() if "$(PIP)" in line or "$(LOCKED)" in line or "pip" in line]
    assert len(installing) == 4
    for line in installing:
        assert "$(LOCKED)" in line or line.strip() == "$(PIP) --no-deps --no-build-isolation -e ."
