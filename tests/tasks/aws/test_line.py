"""How a line is taken apart: as a shell does it, but for what only a shell can carry out, which is refused."""

import pytest

from bombus.tasks.aws.line import LINE_CHARACTERS_MAX, CommandRefused, words_of_line

TABLE = ["aws", "dynamodb", "create-table", "--table-name", "users", "--tags", "a"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        ("  aws s3\tls \n", ["aws", "s3", "ls"]),
        ("aws dynamodb create-table \\\n    --table-name users \\\n    --tags a", TABLE),
        ("aws dynamodb create-table \\\r\n --table-name users \\  \n --tags a", TABLE),
        ("# one table\naws dynamodb create-table --table-name users --tags a # the tags\n# the end\n", TABLE),
        ("aws dynamodb create-table --table-name 'users' --tags \"a\";", TABLE),
        ("aws dynamodb 'create'-\"ta\\\nble\" --table-name us\\ers --tags ''a", TABLE),
        ("aws s3 ls # all", ["aws", "s3", "ls"]),
        ("a#b '#' '' 'a'#b", ["a#b", "#", "", "a#b"]),
        ("'a b'\"c 'd' \"\\ e", ["a bc 'd'  e"]),
        (r"""'\n $x `y` | ; "' """, [r'\n $x `y` | ; "']),
        (r'"\n \" \\ \$x \`y\` | ; $.a $5 cost$"', ['\\n " \\ $x `y` | ; $.a $5 cost$']),
        ('"[?Name==`x`]" [{Key=a,Value=b},{c}] sort(a) * ~ ! $ 100$',
         ["[?Name==`x`]", "[{Key=a,Value=b},{c}]", "sort(a)", "*", "~", "!", "$", "100$"]),
        ("'a\nb' \"c\nd\" \u00a0é", ["a\nb", "c\nd", "\u00a0é"]),
        (r"'it'\''s'", ["it's"]),
    ],
)  # fmt: skip
def test_quotes_backslashes_comments_and_lines_that_go_on_are_read_as_a_shell_reads_them(
    line: str, words: list[str]
) -> None:
    assert words_of_line(line) == words


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("a | b", "|"), ("a|b", "|"), ("a && b", "&&"), ("a&&b", "&&"), ("a || true", "||"), ("a &", "&"),
        ("a > b", ">"), ("a >b", ">"), ("a 2>&1", ">&"), ("a < b", "<"), ("a <<EOF\n{}\nEOF", "<<"),
        ("a $(date)", "$(date"), ("a `date`", "`date`"), ("a $NAME", "$NAME"), ("a ${NAME}", "${NAME"),
        ("a $'b'", "$'b"),
        ('a "x $(date)"', "$(date"), ('a "$NAME"', "$NAME"), ('a "${NAME}"', "${NAME"), ("a `", "`"),
    ],
)  # fmt: skip
def test_what_a_shell_would_do_is_refused_and_named(line: str, what: str) -> None:
    with pytest.raises(CommandRefused) as refused:
        words_of_line(line)
    assert f"there is no shell here to carry out {what}:" in str(refused.value)


@pytest.mark.parametrize("line", ["a; b", "a;b", "a\nb", "a \n b", "a # c\nb", "a;\nb;", "a\n\\\nb"])
def test_a_second_command_is_refused(line: str) -> None:
    with pytest.raises(CommandRefused, match="one command at a time: there is more after the first one"):
        words_of_line(line)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a 'b", r"split into words: a quote \('\) is not closed"),
        ('a "b\\"', r'split into words: a quote \("\) is not closed'),
        ("a \\", "split into words: it ends with a backslash"),
        ("a" * (LINE_CHARACTERS_MAX + 1), "over 20000 characters"),
        ("a \ud800", "is not text"),
        ("a \0", "is not text"),
    ],
)
def test_a_line_that_has_no_words_is_refused(line: str, why: str) -> None:
    with pytest.raises(CommandRefused, match=why):
        words_of_line(line)
