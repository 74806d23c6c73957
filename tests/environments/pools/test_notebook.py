"""The notebook of the examples runs from top to bottom in a kernel of Jupyter's."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.patience import PATIENCE_S

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    read: nbformat.NotebookNode = nbformat.read(EXAMPLES / "eight_environments.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    return read


def shown(cell: nbformat.NotebookNode) -> object:
    """Return the value that a cell shows, None where it shows none."""
    values = [output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result"]
    return ast.literal_eval(values[0]) if values else None


async def test_the_notebook_plays_eight_isolated_environments(
    notebook: nbformat.NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    kernel = NotebookClient(notebook, timeout=PATIENCE_S, resources={"metadata": {"path": str(EXAMPLES)}})
    await kernel.async_execute()
    values = [shown(cell) for cell in notebook.cells if cell.cell_type == "code"]
    _, _, heard, rewards, _, same, code = values
    assert isinstance(heard, list)
    assert isinstance(rewards, list)
    assert len(heard) == 8
    assert heard == sorted(heard, key=["too low", "that is the one", "too high"].index), "guesses of 10, 20, ... 80"
    assert len(rewards) == 8
    assert len(set(rewards)) == 1, "one task for all"
    assert rewards[0] >= 1 / 7**0.5, "halving finds one of 100 in at most 7 guesses"
    assert (same, code) == (True, 0)


def test_the_notebook_is_stored_without_results(notebook: nbformat.NotebookNode) -> None:
    assert all(not cell.get("outputs") for cell in notebook.cells)
