"""Figures as people read them, and text from outside in one line."""

from bombus.figures import byte_size, counted, duration, one_line, seconds_between


def test_durations_and_sizes_are_readable() -> None:
    assert [duration(s) for s in (0.04, 9.96, 59.6, 185, 25_920, 273_600)] == [
        "0.0 s", "10 s", "1 m 00 s", "3 m 05 s", "7 h 12 m", "3 d 04 h",
    ]  # fmt: skip
    assert [byte_size(n) for n in (0, 43_210, 1_234_567, 988_000_000, 999_900_000, 2 << 40)] == [
        "0 B", "43 kB", "1.2 MB", "988 MB", "1.0 GB", "2.2 TB",
    ]  # fmt: skip


def test_a_noun_is_in_the_plural_unless_there_is_one() -> None:
    assert [counted(number, "model") for number in (0, 1, 2)] == ["0 models", "1 model", "2 models"]


def test_no_time_between_two_clocks_is_negative() -> None:
    assert (seconds_between(1_000_000_000, 3_500_000_000), seconds_between(2, 1)) == (2.5, 0)


def test_text_from_outside_is_one_line_without_control_characters() -> None:
    assert one_line(" a\x1b[31m\nb ") == "a [31m b"
