"""Functions by the paths that slime's options give, and the package `slime` that hook files import."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from bombus.errors import Code, Refused, in_one_line

HookFunction = Callable[..., Any]
STAND_IN = Path(__file__).parent / "importable"


def make_slime_importable() -> bool:
    """Let `import slime` find our package where slime itself is not installed. Returns whether it is ours.

    Modules of the working directory are found too, as slime's launchers find them.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if str(STAND_IN) not in sys.path and importlib.util.find_spec("slime") is None:
        sys.path.append(str(STAND_IN))
    return str(STAND_IN) in sys.path


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
