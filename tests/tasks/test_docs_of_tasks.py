"""The programs of docs/tasks.md run as they stand there."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/tasks.md"


@pytest.mark.parametrize("program", re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
def test_a_program_of_the_page_runs(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(program, str(PAGE), "exec"), names)
    if "sampler" in names:
        given = [next(names["sampler"]).task_id for _ in range(3)]  # type: ignore[call-overload]
        assert given == ["add", "add", "add"]
    else:
        assert "train" in names
