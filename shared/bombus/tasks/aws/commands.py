"""Which command lines are carried out: one of `aws` at a time, on the simulator, and on no files. Pure."""

import shlex
from collections.abc import Sequence

from bombus.errors import BombusError

COMMAND_CHARACTERS_MAX = 20_000
OPERATORS = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "<", "<<"})
ELSEWHERE = frozenset({"--endpoint-url", "--profile", "--ca-bundle", "--no-verify-ssl", "--debug"})
NOT_HERE = frozenset({"help", "configure", "history"})
WITH_FILES = frozenset({"s3", "s3api", "lambda", "glacier"})


class CommandRefused(BombusError):
    """A command line is not carried out; the sentence says why."""


def words_of_command(line: str) -> list[str]:
    """Return the words after `aws`. Raises `CommandRefused`."""
    if len(line) > COMMAND_CHARACTERS_MAX:
        raise CommandRefused(f"the command has over {COMMAND_CHARACTERS_MAX} characters")
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise CommandRefused(f"the command cannot be split into words: {error}") from error
    if words[:1] != ["aws"]:
        raise CommandRefused("only commands of aws are carried out, such as: aws s3 ls")
    if OPERATORS & set(words):
        raise CommandRefused("there is no shell: give one command of aws, without pipes and redirections")
    _check(words[1:])
    return words[1:]


def _check(words: Sequence[str]) -> None:
    for word in words:
        if word.split("=")[0] in ELSEWHERE:
            raise CommandRefused(
                f"{word.split('=')[0]} is not for you: every command goes to the account that is set up"
            )
        if "file://" in word or "fileb://" in word:
            raise CommandRefused("there are no files here: write the value itself into the command")
    if NOT_HERE & set(words[:3]):
        raise CommandRefused(f"aws {' '.join(words[:3])} is not carried out here")
    if WITH_FILES & set(words[:1]):
        for word in words:
            if word.startswith(("/", "~")) or ".." in word.split("/"):
                raise CommandRefused(f"{word} is outside of the folder that there is: give a name without a path")
