"""What is said of errors that other code has raised."""

import json

import pytest

from bombus.errors import FOREIGN_TEXT_MAX, in_one_line, with_place


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_is_told_in_one_line_that_utf_8_can_hold() -> None:
    assert in_one_line(ValueError("two\n  lines")) == "ValueError: two lines"
    assert in_one_line(ValueError("half a pair \ud800")) == "ValueError: half a pair ?"
    assert in_one_line(KeyError()) == "KeyError"
    assert in_one_line(ValueError("x" * 1000)) == "ValueError: " + "x" * FOREIGN_TEXT_MAX
    assert in_one_line(Mute()) == "Mute: its text is not available: str() raised RuntimeError"


def test_the_place_of_an_error_is_the_programs_own_line_and_not_a_librarys() -> None:
    with pytest.raises(ValueError, match="property name") as raised:
        json.loads("{")
    line = raised.traceback[0].lineno + 1  # it counts from 0
    assert with_place(raised.value).endswith(f" (test_errors.py, line {line})")
    assert with_place(ValueError("never raised")) == "ValueError: never raised"
