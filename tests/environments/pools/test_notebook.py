"""The notebook of the examples runs from top to bottom, cell by cell, in a loop that already runs, as in a kernel."""

import ast
import asyncio
import inspect
import json
import subprocess
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
NOTEBOOK = json.loads((EXAMPLES / "eight_worlds.ipynb").read_text())


async def run_cell(source: str, names: dict[str, Any]) -> object:
    """Run a cell as IPython does, and return the value of the expression at its end."""
    *body, last = ast.parse(source).body
    ends_with_value = isinstance(last, ast.Expr)
    if ends_with_value:
        last = ast.copy_location(ast.Assign(targets=[ast.Name("_", ast.Store())], value=last.value), last)  # type: ignore[attr-defined]
    tree = ast.fix_missing_locations(ast.Module(body=[*body, last], type_ignores=[]))
    code: CodeType = compile(tree, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        await result
    return names.pop("_") if ends_with_value else None


async def test_the_notebook_plays_eight_isolated_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    names: dict[str, Any] = {}
    values = []
    try:
        for cell in NOTEBOOK["cells"]:
            if cell["cell_type"] == "code":
                values.append(await run_cell("".join(cell["source"]), names))
    finally:
        server: subprocess.Popen[str] = names["server"]
        server.terminate()
        await asyncio.to_thread(server.wait)
    _, _, heard, rewards, _, same, code = values
    assert isinstance(heard, list)
    assert isinstance(rewards, list)
    assert len(heard) == 8
    assert heard == sorted(heard, key=["too low", "that is the one", "too high"].index), "guesses of 10, 20, ... 80"
    assert len(rewards) == 8
    assert len(set(rewards)) == 1, "one task for all"
    assert rewards[0] >= 1 / 7**0.5, "halving finds one of 100 in at most 7 guesses"
    assert (same, code) == (True, 0)


def test_the_notebook_is_stored_without_results() -> None:
    assert all(not cell.get("outputs") for cell in NOTEBOOK["cells"])
