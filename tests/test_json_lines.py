"""Files with a JSON object in each line: tasks, prompts, documents and questions are all read by this reader."""

import json
from pathlib import Path

import pytest

from bombus.errors import Refused
from bombus.json_lines import read_json_lines


def number_of(line: str, number: int) -> tuple[int, int]:
    found = json.loads(line)["n"]
    if found < 0:
        raise ValueError("it is below 0")
    return number, found


def written(folder: Path, content: bytes) -> Path:
    path = folder / "numbers.jsonl"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_lines_are_counted_as_an_editor_counts_them_and_empty_ones_are_left_out(tmp_path: Path, ending: bytes) -> None:
    lines = [b'\xef\xbb\xbf{"n": 1}', b"", b"  ", '{"n": 2, "text": "one\u2028line\u0085"}'.encode(), b'{"n": 3}']
    assert read_json_lines(written(tmp_path, ending.join(lines)), "number", number_of) == [(1, 1), (4, 2), (5, 3)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2 is not a number: JSONDecodeError"),
        ('{"m": 1}', "line 2 is not a number: KeyError: 'n'"),
        ("7", "line 2 is not a number: TypeError"),
        ("[" * 200_000, "line 2 is not a number: RecursionError"),
        ('{"n": -1}', "line 2 is not a number: it is below 0"),
    ],
    ids=["no JSON", "a field too few", "no object", "too deep", "what the reader says"],
)
def test_a_line_that_is_wrong_is_told_by_its_number(tmp_path: Path, line: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        read_json_lines(written(tmp_path, f'{{"n": 1}}\n{line}\n{{"n": 3}}'.encode()), "number", number_of)


def test_a_file_that_cannot_be_used_is_refused_with_the_option_that_named_it(tmp_path: Path) -> None:
    empty = "has no number: it must have a JSON object on each line"
    for content, why in ((b" \n\n", empty), (b"\xff", "cannot be read")):
        with pytest.raises(Refused, match=rf"--numbers .*numbers\.jsonl {why}"):
            read_json_lines(written(tmp_path, content), "number", number_of, option="--numbers")
    with pytest.raises(Refused, match=r"--numbers .*none\.jsonl cannot be read"):
        read_json_lines(tmp_path / "none.jsonl", "number", number_of, option="--numbers")
    large = written(tmp_path, b"")
    with large.open("wb") as file:
        file.truncate(3 << 20)
    with pytest.raises(Refused, match="exceeds the limit of 2 MiB: split it"):
        read_json_lines(large, "number", number_of, bytes_max=2 << 20)
