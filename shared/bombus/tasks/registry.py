"""All families of ready-made tasks, and the function that opens a set by its name."""

from collections.abc import Mapping
from importlib.util import find_spec

from bombus.errors import Code, Refused
from bombus.tasks import reasoning, shell, textgames
from bombus.tasks.aws import family as aws
from bombus.tasks.kinds import TaskFamily, TaskSet, TasksNotInstalled
from bombus.tasks.search import family as search

FAMILIES: dict[str, TaskFamily] = {
    family.name: family for family in (reasoning.FAMILY, textgames.FAMILY, search.FAMILY, shell.FAMILY, aws.FAMILY)
}


def is_installed(family: TaskFamily) -> bool:
    """Return whether the package that a family needs can be imported."""
    return not family.package or find_spec(family.package) is not None


def how_to_install(family: TaskFamily) -> str:
    return f"pip install 'bombus[{family.extra}]'"


def family_of(name: str) -> TaskFamily:
    """Return a family by its own name or by the name of one of its sets. Raises `Refused` if there is none."""
    family = FAMILIES.get(name.partition(":")[0])
    if family is None:
        own = ". To play your own tasks, use `bombus eval --env`, or `Rollout` in a program (docs/environments.md)"
        known = f"there are no tasks {name!r}: the choices are {', '.join(FAMILIES)}; see `bombus tasks`"
        raise Refused(Code.BAD_CONFIG, known + (own if name.endswith(".jsonl") else ""))
    return family


def open_tasks(name: str, options: Mapping[str, str] = {}) -> TaskSet:
    """Open a set of tasks by its name, such as `reasoning_gym:leg_counting`. The caller must close it.

    Raises `Refused` for an unknown name or option, or `TasksNotInstalled`.
    """
    family = family_of(name)
    _, colon, member = name.partition(":")
    if not is_installed(family):
        raise TasksNotInstalled(f"{family.name} needs {family.package}: {how_to_install(family)}")
    if bool(colon and member) != family.has_names:
        form = f"{family.name}:<name>; `bombus tasks {family.name}` lists them" if family.has_names else family.name
        raise Refused(Code.BAD_CONFIG, f"{name!r} does not name tasks of {family.name}: write {form}")
    return family.open(member, options)
