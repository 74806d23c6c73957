"""Files of tasks."""

from pathlib import Path

import pytest

from bombus.errors import Refused
from bombus.rollout.tasks import TASK_BYTES, read_tasks


def written(folder: Path, text: str) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text(text)
    return path


def test_each_line_is_a_task_and_empty_lines_are_none(tmp_path: Path) -> None:
    first, second = read_tasks(
        written(tmp_path, '{"prompt": "Fix it", "task_id": "a", "issue": 17}\n\n{"prompt": "Test it"}\n')
    )
    assert (first.task_id, first.prompt, first.fields) == ("a", "Fix it", {"issue": 17})
    assert second.task_id.startswith("tasks-3-"), "the number of its line, and its digest"
    assert first.as_json() == '{"task_id":"a","prompt":"Fix it","issue":17}'


def test_texts_are_put_into_commands_as_they_are_and_other_values_as_json(tmp_path: Path) -> None:
    (task,) = read_tasks(written(tmp_path, '{"prompt": "p", "n": 1.5, "files": ["a", "b"], "mode": "fast"}'))
    assert task.words() == {"task_id": task.task_id, "prompt": "p", "n": "1.5", "files": '["a","b"]', "mode": "fast"}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[1]", "line 2 is not a task: it is not a JSON object"),
        ('{"prompt": "half', "line 2 is not a task: it is not a JSON object"),
        ('{"task_id": "b"}', "line 2 is not a task: it has no `prompt`"),
        ('{"prompt": ""}', "line 2 is not a task: it has no `prompt`"),
        ('{"prompt": "p", "task_id": 7}', "line 2 is not a task: `task_id` must be a string"),
        ('{"prompt": "p", "task_id": "a"}', "line 2 is not a task: task_id 'a' is already used on line 1"),
        ('{"prompt": "p", "workspace": "x"}', "line 2 is not a task: a task cannot set `workspace`"),
        ('{"prompt": "\\u0000"}', "line 2 is not a task: it has a null character"),
        (f'{{"prompt": "{"x" * TASK_BYTES}"}}', f"line 2 is not a task: it has over {TASK_BYTES} bytes"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(tmp_path: Path, line: str, why: str) -> None:
    path = written(tmp_path, f'{{"prompt": "p", "task_id": "a"}}\n{line}\n')
    with pytest.raises(Refused, match=why):
        read_tasks(path)


def test_a_file_without_tasks_or_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="has no task"):
        read_tasks(written(tmp_path, "\n"))
    with pytest.raises(Refused, match=r"--task .*none\.jsonl cannot be read"):
        read_tasks(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(Refused, match="cannot be read"):
        read_tasks(tmp_path / "binary")


def test_files_of_one_name_have_other_tasks_where_they_differ(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    mine = [task.task_id for task in read_tasks(written(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\n'))]
    theirs = [task.task_id for task in read_tasks(written(tmp_path / "other", '{"prompt": "a"}\n{"prompt": "c"}'))]
    assert mine[0] == theirs[0]
    assert mine[1] != theirs[1]


def test_only_a_newline_ends_a_line_and_a_mark_of_the_encoding_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\r\n'.encode())
    assert [task.prompt for task in read_tasks(path)] == ["a\u2028b\u0085c", "d"]


def test_a_line_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    nested = "[" * 5000 + "]" * 5000
    with pytest.raises(Refused, match="line 1 is not a task: it is nested too deeply"):
        read_tasks(written(tmp_path, f'{{"prompt": "p", "lists": {nested}}}'))
