"""Command-line arguments generated from the fields of a settings model, and errors that name the flag as typed."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from bombus.config.groups import allowed, without_none
from bombus.errors import Code, Refused
from bombus.hive.subjects import check_name

Settings = TypeVar("Settings", bound=BaseModel)


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one sentence, without the list of all arguments."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}; see `{self.prog} --help`\n")


# ---- arguments from a settings model ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Describes a field's command-line flag, where it differs from what the field itself says.

    Put it into the field's annotation: `room: Annotated[int, Flag(metavar="MB")] = Field(default=0, description=...)`.

    - `name` is the flag, such as `--nats`; by default the field's name with dashes. `also` is another name for it.
    - `metavar` is the value's placeholder in the help; by default N for a whole number, otherwise the field's name.
    - `help` replaces the field's description.
    - `default` describes the default if its value is not self-explanatory: "a new name".
    - `choices` are the values that can be typed, if the field accepts others too.
    - `read` converts the typed text (each item if the field is a tuple); it raises `argparse.ArgumentTypeError`.
    - `declared_elsewhere`: another function, such as `add_hive_arguments`, adds the argument to the parser.
    """

    name: str = ""
    also: str = ""
    metavar: str | None = None
    help: str = ""
    default: str = ""
    choices: tuple[str, ...] = ()
    read: Callable[[str], object] | None = None
    declared_elsewhere: bool = False

    def over(self, other: "Flag") -> "Flag":
        """Return this flag, with its empty attributes taken from `other`."""
        return replace(other, **{name: said for name, said in vars(self).items() if said})


@dataclass(frozen=True)
class NoFlag:
    """Marks a field that the command line does not set. Its value is passed to `settings_from`."""


@dataclass(frozen=True)
class FlagArgument:
    """A field that has a flag. `path` is its dotted path in the settings."""

    path: str
    field: FieldInfo
    flag: Flag

    @property
    def name(self) -> str:
        return self.flag.name or "--" + self.path.rpartition(".")[2].replace("_", "-")

    @property
    def destination(self) -> str:
        """Return the attribute of the parsed arguments, which argparse names after the flag."""
        return self.name.removeprefix("--").replace("-", "_")

    def add_to(self, parser: "argparse._ActionsContainer", *, overrides: bool = False) -> None:
        """Add the argument. With `overrides`, its default is None, so that only a typed flag overrides a file."""
        default = self.field.get_default(call_default_factory=True, validated_data={})
        given: dict[str, Any] = {"help": self._help(default), "default": None if overrides else default}
        names = (self.name, self.flag.also) if self.flag.also else (self.name,)
        kind = _without_annotation(without_none(self.field.annotation))
        if kind is bool:
            given["action"] = "store_true" if default is False else argparse.BooleanOptionalAction
            parser.add_argument(*names, **given)
            return
        if get_origin(kind) is tuple:
            kind = _without_annotation(get_args(kind)[0])
            given |= {"action": "append", "default": None}  # argparse would append to any other default
        given |= _values(kind) if self.flag.read is None else {"type": self.flag.read}
        given |= {"choices": self.flag.choices} if self.flag.choices else {}
        if metavar := self.flag.metavar or ("N" if given.get("type") is int else None):
            given["metavar"] = metavar
        parser.add_argument(*names, **given)

    def _help(self, default: object) -> str:
        text = (self.flag.help or self.field.description or "").replace("%", "%%")
        if self.flag.default:
            return f"{text} (default: {self.flag.default})"
        if default is None or default is False or default in ("", ()):
            return text
        shown = typed(default) if isinstance(default, tuple) else str(default)
        return f"{text} (default: {shown.replace('%', '%%')})"


def add_settings_arguments(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """Add an argument for each field of a settings model, with the field's flag, type, choices, help and default.

    The fields of nested models get arguments too. If a field that holds a nested model has a title, its arguments are
    listed in the help under that title, with the field's description.
    """
    groups: dict[str, argparse._ActionsContainer] = {}
    for argument in _arguments(model):
        if argument.flag.declared_elsewhere:
            continue
        group = argument.path.partition(".")[0] if "." in argument.path else ""
        if group not in groups:
            holder = model.model_fields.get(group)
            titled = holder is not None and holder.title is not None
            groups[group] = parser.add_argument_group(holder.title, holder.description) if titled and holder else parser
        argument.add_to(groups[group])


def settings_from(
    model: type[Settings],
    arguments: argparse.Namespace,
    given: Mapping[str, object] = {},
    flags: Mapping[str, str] = {},
) -> Settings:
    """Create settings from parsed arguments. Raises `Refused(BAD_CONFIG)` with a sentence for each problem.

    `given` maps dotted paths to values, for fields that have no flag or to override typed values. For `flags`, see
    `made_of_flags`.
    """
    tree: dict[str, Any] = {}
    found = {argument.path: getattr(arguments, argument.destination) for argument in _arguments(model)}
    for path, value in {**{path: value for path, value in found.items() if value is not None}, **given}.items():
        *groups, name = path.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value
    return made_of_flags(model, tree, flags)


def _arguments(model: type[BaseModel], prefix: str = "") -> Iterator[FlagArgument]:
    for name, field in model.model_fields.items():
        if any(isinstance(item, NoFlag) for item in field.metadata):
            continue
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _arguments(kind, f"{prefix}{name}.")
            continue
        yield FlagArgument(f"{prefix}{name}", field, flag_in(field))


def flag_in(field: FieldInfo) -> Flag:
    """Return the `Flag` in a field's annotation, or an empty one."""
    return next((item for item in field.metadata if isinstance(item, Flag)), Flag())


def _values(kind: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` that describe the values of a type."""
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"choices": tuple(str(member) for member in kind)}
    return {"type": kind}


def _without_annotation(kind: Any) -> Any:
    """Return X for `Annotated[X, ...]`, and any other type unchanged."""
    return kind.__origin__ if hasattr(kind, "__metadata__") else kind


# ---- refusals -------------------------------------------------------------------------------------------------------


def name_of(what: str) -> Callable[[str], str]:
    """Return an argparse type that checks the name of a hive or an engine."""

    def checked(name: str) -> str:
        try:
            return check_name(name, what)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def check_range(flag: str, value: float, least: float, most: float) -> None:
    """Raise `Refused(BAD_CONFIG)` for a value that is not between `least` and `most`."""
    if not least <= value <= most:
        raise Refused(Code.BAD_CONFIG, f"{flag} {value} is refused: it must be from {least} to {most}")


def flags_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the flag of each field that has one, by the field's dotted path."""
    return {argument.path: argument.name for argument in _arguments(model)}


def typed_flags(settings: BaseModel, *names: str) -> list[str]:
    """Return the command-line words that set these fields (all by default) where they differ from their defaults."""
    found = {argument.path: argument for argument in _arguments(type(settings))}
    words = []
    for name in names or found:
        flag, value = found[name].name, getattr(settings, name)
        if value != found[name].field.default:
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, bool):
                    words.append(flag if each else f"--no-{flag.removeprefix('--')}")
                else:
                    words += [flag, str(each)]
    return words


def made_of_flags(model: type[Settings], given: Mapping[str, object], flags: Mapping[str, str] = {}) -> Settings:
    """Create settings from typed values. Raises `Refused(BAD_CONFIG)` with a sentence for each problem.

    The sentences refer to a field by its flag. `flags` maps dotted paths to flags that replace the fields' own; the
    flag for the empty path is the one to name if several fields do not fit together.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        names = flags_of(model) | dict(flags)
        sentences = []
        for problem in error.errors(include_url=False):
            path = ".".join(str(part) for part in problem["loc"] if isinstance(part, str))
            flag = names.get(path, f"--{path.rpartition('.')[2].replace('_', '-')}" if path else "")
            why = problem["msg"].removeprefix("Value error, ")
            field = _field(model, path)
            if not path or field is None:
                sentences.append(f"{flag}: {why}".removeprefix(": "))
            else:
                takes = why if problem["type"] == "value_error" else allowed(field)
                sentences.append(f"{flag} {typed(problem['input'])} is refused: {takes}")
        raise Refused(Code.BAD_CONFIG, "; ".join(sentences)) from error


def typed(value: object) -> str:
    """Return a value as it would be typed on a command line."""
    return shlex.join(str(item) for item in value) if isinstance(value, list | tuple) else shlex.quote(str(value))


def _field(model: type[BaseModel], path: str) -> FieldInfo | None:
    found: FieldInfo | None = None
    for name in path.split("."):
        fields = model.model_fields if found is None else getattr(found.annotation, "model_fields", {})
        found = fields.get(name)
        if found is None:
            return None
    return found
