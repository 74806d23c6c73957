"""Splits a command line into words as a shell does, and refuses anything that only a shell could carry out. Pure."""

import re

from bombus.errors import BombusError

LINE_CHARACTERS_MAX = 20_000

_TOKEN = re.compile(
    r"""
      (?P<goes_on> \\[ \t]*\r?\n )                          # spaces after the backslash are not part of the text
    | (?P<space>   [ \t\r\n]+ )
    | ' (?P<single> [^']* ) '
    | " (?P<double> [^"\\]* (?: \\. [^"\\]* )* ) "
    | \\ (?P<escaped> . )
    | (?P<open>    ['"\\] )
    | (?P<end>     ; )
    | (?P<shell>   [|&<>]+ | `[^`]*`? | \$[A-Za-z_({'"]\w* )
    | (?P<plain>   [^ \t\r\n'"\\|&;<>`$]+ | \$ )
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_DOUBLE_QUOTES = re.compile(r'\\\r?\n|\\([$`"\\])|(\$[A-Za-z_({]\w*)')


class CommandRefused(BombusError):
    """Raised if a command line is not carried out. The message gives the reason."""


def words_of_line(line: str) -> list[str]:
    """Return the words of one command, without quotes and comments. Raises `CommandRefused` for a line that is not a
    single plain command."""
    if len(line) > LINE_CHARACTERS_MAX:
        raise CommandRefused(f"the command has over {LINE_CHARACTERS_MAX} characters")
    if any("\ud800" <= each <= "\udfff" or each == "\0" for each in line):
        raise CommandRefused("the command contains a character that is not text: leave it out")
    words: list[str] = []
    word: str | None = None
    is_over, position = False, 0
    while position < len(line):
        token = _TOKEN.match(line, position)
        assert token is not None, line[position]
        kind, text = token.lastgroup, token[token.lastgroup or 0]
        position = token.end()
        if kind == "plain" and word is None and text.startswith("#"):
            position = line.find("\n", token.start()) % (len(line) + 1)  # -1, which means no newline, becomes the end
        elif kind in ("space", "end"):
            if word is not None:
                words.append(word)
                word = None
            is_over |= bool(words) and (kind == "end" or "\n" in text)
        elif kind != "goes_on":
            if is_over:
                raise CommandRefused("give one command at a time: there is more after the first one")
            word = (word or "") + _text(kind, text)
    return words if word is None else [*words, word]


def _text(kind: str | None, text: str) -> str:
    if kind == "open":
        why = "it ends with a backslash" if text == "\\" else f"a quote ({text}) is not closed"
        raise CommandRefused(f"the command cannot be split into words: {why}")
    if kind == "shell":
        raise _no_shell(text)
    return _IN_DOUBLE_QUOTES.sub(_unescaped, text) if kind == "double" else text


def _unescaped(found: re.Match[str]) -> str:
    if found[2]:
        raise _no_shell(found[2])
    return found[1] or ""


def _no_shell(text: str) -> CommandRefused:
    return CommandRefused(
        f"there is no shell here to carry out {text[:40]}: give one command of aws, without pipes, redirections "
        "and variables. In single quotes it is treated as text"
    )
