"""Functions by the paths that slime's options give, and the package `slime` that hook files import."""

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from bombus.errors import Code, Refused, in_one_line

HookFunction = Callable[..., Any]
STAND_IN = Path(__file__).parent / "importable"


def make_slime_importable() -> bool:
    """Let `import slime` find our package where slime itself is not installed. Returns whether it is ours.

    Modules of the working directory are found too, as slime's launchers find them. A checkout of slime there, which
    needs packages that are not installed, does not count.
    """
    here = os.getcwd()
    elsewhere = [place for place in sys.path if place and Path(place).resolve() != Path(here).resolve()]
    if PathFinder.find_spec("slime", [place for place in elsewhere if place != str(STAND_IN)]) or _is_distributed():
        return False
    sys.path[:] = [str(STAND_IN), here, *(place for place in elsewhere if place != str(STAND_IN))]
    return True


def _is_distributed() -> bool:
    """Return whether pip has installed slime, perhaps as a link to a checkout."""
    try:
        distribution("slime")
    except PackageNotFoundError:
        return False
    return True


@cache
def load_function(path: str) -> Any:
    """Return what `package.module.function` names, or `folder/file.py:function`. Raises `Refused`.

    A file's folder is put on the path of imports, so that it finds the modules beside it.
    """
    module, function = _parts(path)
    try:
        found: Any = importlib.import_module(module)
        return getattr(found, function)
    except (ImportError, AttributeError, SyntaxError) as error:
        why = f"{path} cannot be imported: {in_one_line(error)}"
        raise Refused(Code.BAD_CONFIG, f"{why}. Write package.module.function or file.py:function") from error


def _parts(path: str) -> tuple[str, str]:
    file, mark, function = path.rpartition(":")
    if mark and file.endswith(".py"):
        found = Path(file).resolve()
        if not found.is_file():
            raise Refused(Code.BAD_CONFIG, f"{file} is not a file: name a function as file.py:function")
        if str(found.parent) not in sys.path:
            sys.path.insert(0, str(found.parent))
        return found.stem, function
    module, dot, function = path.rpartition(".")
    if not dot:
        why = f"{path!r} names no function: write package.module.function or file.py:function"
        raise Refused(Code.BAD_CONFIG, why)
    return module, function
