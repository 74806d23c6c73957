"""The lock files of `make setup`: everything is pinned, and nothing without a hash is installed."""

import re
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.lock import ALONE, BUILD, LOCKS, entries

ROOT = Path(__file__).parent.parent
LOCKED = {name: entries((LOCKS / f"{name}.txt").read_text()) for name in ("build", "run", "dev", "cpu", "cuda")}


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


def test_a_user_gets_no_linters_and_no_test_tools() -> None:
    run = {canonicalize_name(name) for name in LOCKED["run"]}
    seen: set[tuple[str, frozenset[str]]] = set()
    needed("bombus", frozenset({"demo", "environments-server"}), seen)
    of_tools = {
        canonicalize_name(Requirement(line).name) for line in requires("bombus") or () if "extra == 'dev'" in line
    }
    assert {"pytest", "mypy", "ruff", "pandas", "ipykernel"} <= of_tools - {name for name, _ in seen}
    assert not run & (of_tools - {name for name, _ in seen})
    installed = run.union(*(map(canonicalize_name, LOCKED[name]) for name in ("build", "cpu")))
    assert {name for name, _ in seen} - {"bombus"} <= installed


def test_make_setup_installs_nothing_without_a_hash() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipes = "".join(
        makefile.partition(target)[2].partition("\n\n")[0] for target in ("\n$(STAMP):", "\n$(DEV_STAMP):")
    )
    installing = [line.strip() for line in recipes.splitlines() if re.search(r"\$\((PIP|LOCKED|UV)\)|pip", line)]
    assert len(installing) == 5
    for line in installing:
        assert line.startswith(("$(LOCKED)", "$(UV)")) or line == "$(PIP) --no-deps --no-build-isolation -e ."
    assert re.search(r"^LOCKED := .* --require-hashes ", makefile, re.MULTILINE)
    assert re.search(r"^UV := .* --require-hashes ", makefile, re.MULTILINE)
