"""Loads functions by the paths in slime's options, and provides the package `slime` that hook files import."""

import importlib
import os
import sys
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from bombus.errors import Code, Refused, in_one_line

STAND_IN = Path(__file__).parent / "importable"
FORMS = "Write package.module.function or file.py:function"

# Why some of slime's modules are missing here. An unlisted module has the same reason as its nearest listed parent.
NEEDED = {
    "slime": "it is a part of slime's own trainer and servers",
    "slime.agent": "its agents work in E2B's sandboxes, behind slime's servers; `bombus rollout` runs coding agents",
    "slime.rollout": "it drives slime's own trainer and servers",
    "slime.rollout.on_policy_distillation": "slime's trainer would have to take a teacher's logprobs from samples",
    "slime.rollout.rm_hub": "it is one of slime's own rewards: put a copy of its file beside the hook file",
    "slime.utils.processing_utils": "it is for images in prompts, which episodes here do not support",
}


def make_slime_importable() -> bool:
    """Make `import slime` find our package if slime itself is not installed. Return whether it does.

    Modules in the working directory are found too, as with slime's launchers. A checkout of slime there does not count
    as installed, because the packages that it needs are missing.
    """
    here = os.getcwd()
    elsewhere = [place for place in sys.path if place and Path(place).resolve() != Path(here).resolve()]
    if PathFinder.find_spec("slime", [place for place in elsewhere if place != str(STAND_IN)]) or _is_distributed():
        return False
    sys.path[:] = [str(STAND_IN), here, *(place for place in elsewhere if place != str(STAND_IN))]
    importlib.import_module("slime")  # done before a hook file puts a checkout's folder first
    return True


def _is_distributed() -> bool:
    """Return whether slime was installed with pip, perhaps as a link to a checkout."""
    try:
        distribution("slime")
    except PackageNotFoundError:
        return False
    return True


@cache
def load_function(path: str) -> Any:
    """Return the function `package.module.function` or `folder/file.py:function`. Raises `Refused` if the function
    cannot be loaded.

    A file's folder is added to `sys.path`, so that the file can import the modules beside it.
    """
    module, function = _parts(path)
    try:
        found: Any = _import_file(module) if isinstance(module, Path) else importlib.import_module(module)
    except Exception as error:  # the user's code may raise anything while it is imported
        raise Refused(Code.BAD_CONFIG, f"{path} cannot be imported: {_why_not(error, str(module))}") from error
    if not hasattr(found, function):
        raise Refused(Code.BAD_CONFIG, f"{path} cannot be imported: {module} has no {function!r}. {FORMS}")
    return getattr(found, function)


def _why_not(error: BaseException, module: str) -> str:
    """Return why a module cannot be imported. A missing name in slime is reported first, whatever error it led to."""
    cause: BaseException | None = error
    while cause is not None:
        name = cause.name if isinstance(cause, ImportError) else None
        if name is not None and name.partition(".")[0] == "slime":
            what = str(cause).split("'")[1] if str(cause).startswith("cannot import name") else ""
            return _not_here(name, what)
        cause = cause.__cause__ or cause.__context__
    said = in_one_line(error)
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return said
    is_the_path = module == error.name or module.startswith(f"{error.name}.")
    return f"{said}. {FORMS}" if is_the_path else f"{said}; it imports that module: install it"


def _not_here(module: str, name: str) -> str:
    above = module
    while above not in NEEDED:
        above = above.rpartition(".")[0]
    what = f"{name} of {module}" if name else module
    return f"it imports {what}, which bombus lacks: {NEEDED[above]}. docs/slime.md lists what is supported"


def _import_file(file: Path) -> ModuleType:
    """Import a file as a module, which is named after the file unless another module already has that name."""
    known = sys.modules.get(file.stem)
    name = file.stem if known is None or _is_of(known, file) else f"{file.stem} at {file}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _is_of(module: ModuleType, file: Path) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is not None and Path(origin).resolve() == file


def _parts(path: str) -> tuple[str | Path, str]:
    file, mark, function = path.rpartition(":")
    if mark and file.endswith(".py"):
        found = Path(file).resolve()
        if not found.is_file():
            raise Refused(Code.BAD_CONFIG, f"{file} is not a file: name a function as file.py:function")
        if str(found.parent) not in sys.path:
            sys.path.insert(0, str(found.parent))
        return found, function
    module, dot, function = path.rpartition(".")
    if not dot:
        raise Refused(Code.BAD_CONFIG, f"{path!r} names no function. {FORMS}")
    return module, function
