"""`bombus tasks`: lists the tasks that are ready to play, and says what the others lack."""

import argparse

from bombus.tasks.kinds import TaskFamily, TaskName, TasksNotInstalled
from bombus.tasks.registry import FAMILIES, family_of, how_to_install, is_installed
from bombus.terminal import complain, say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("family", nargs="?", default="", help="list the names of this family, such as reasoning_gym")
    parser.add_argument("--json", action="store_true", help="print it as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    families = [family_of(arguments.family)] if arguments.family else list(FAMILIES.values())
    if arguments.json:
        say_json([_described(family) for family in families])
    elif arguments.family:
        return _list_names(families[0])
    else:
        say(*(line for family in families for line in _lines(family)))
    return 0


def _names(family: TaskFamily) -> list[TaskName] | None:
    """Return the names in a family, or None if the family is not installed or not usable."""
    if not is_installed(family):
        return None
    try:
        return list(family.names())
    except TasksNotInstalled:
        return None


def _lines(family: TaskFamily) -> list[str]:
    names = _names(family)
    named = f"{family.name}:<name>" if family.has_names else family.name
    if names is None:
        state = f"not installed: {how_to_install(family)}"
    elif family.has_names:
        flawed = sum(bool(name.flaw) for name in names)
        state = f"{len(names)} names" + (f", {flawed} of them flawed" if flawed else "")
    else:
        state = "ready"
    return [f"{named:<22} {state}", f"{'':<22} {family.about}"]


def _list_names(family: TaskFamily) -> int:
    names = _names(family)
    if names is None:
        complain(f"bombus tasks: {family.name} is not installed: {how_to_install(family)}")
        return 1
    if not names:
        say(f"{family.name}: {family.about}")
    for name in names:
        say(f"{family.name}:{name.name}" + (f"  ({name.flaw})" if name.flaw else ""))
    if family.options:
        say(f"--set NAME=VALUE of `bombus run`: {', '.join(sorted(family.options))}")
    return 0


def _described(family: TaskFamily) -> dict[str, object]:
    names = _names(family)
    return {
        "family": family.name,
        "about": family.about,
        "installed": names is not None,
        "install": how_to_install(family) if family.extra else "",
        "names": [{"name": name.name, "flaw": name.flaw} for name in names or []],
    }
