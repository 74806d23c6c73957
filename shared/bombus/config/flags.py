"""A command line that is refused: one sentence for each thing that is wrong, naming the flag as it is typed."""

import argparse
import shlex
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from bombus.config.groups import allowed
from bombus.errors import Code, Refused
from bombus.hive.subjects import check_name

Settings = TypeVar("Settings", bound=BaseModel)


class Parser(argparse.ArgumentParser):
    """Of argparse's refusals the sentence alone, without the list of everything that could be typed."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}; see `{self.prog} --help`\n")


def name_of(what: str) -> Callable[[str], str]:
    """What argparse checks the name of a hive or an engine with."""

    def checked(name: str) -> str:
        try:
            return check_name(name, what)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def check_range(flag: str, value: float, least: float, most: float) -> None:
    """Raises `Refused(BAD_CONFIG)`."""
    if not least <= value <= most:
        raise Refused(Code.BAD_CONFIG, f"{flag} {value} is refused: it takes {least} to {most}")


def made_of_flags(model: type[Settings], given: Mapping[str, object], flags: Mapping[str, str]) -> Settings:
    """Settings out of what was typed. Raises `Refused(BAD_CONFIG)` with a sentence for each thing that is wrong.

    `flags` has the flag of a field where that is not called like it, by the dotted path; under the empty path the one
    that a fault of several fields together is about.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        sentences = []
        for problem in error.errors(include_url=False):
            path = ".".join(str(part) for part in problem["loc"] if isinstance(part, str))
            flag = flags.get(path, f"--{path.rpartition('.')[2].replace('_', '-')}" if path else "")
            why = problem["msg"].removeprefix("Value error, ")
            field = _field(model, path)
            if not path or field is None:
                sentences.append(f"{flag}: {why}".removeprefix(": "))
            else:
                takes = why if problem["type"] == "value_error" else allowed(field)
                sentences.append(f"{flag} {typed(problem['input'])} is refused: {takes}")
        raise Refused(Code.BAD_CONFIG, "; ".join(sentences)) from error


def typed(value: object) -> str:
    """A value as it stands on a command line."""
    return shlex.join(str(item) for item in value) if isinstance(value, list | tuple) else shlex.quote(str(value))


def _field(model: type[BaseModel], path: str) -> FieldInfo | None:
    found: FieldInfo | None = None
    for name in path.split("."):
        fields = model.model_fields if found is None else getattr(found.annotation, "model_fields", {})
        found = fields.get(name)
        if found is None:
            return None
    return found
