"""Flags that override the keys of a cluster file. A flag has the type, choices and default of its key."""

import argparse
from collections.abc import Callable, Iterator, Mapping

from pydantic import BaseModel

from bombus.config.cluster import Cluster
from bombus.config.flags import Flag, FlagArgument, flag_in
from bombus.config.groups import Tree
from bombus.config.parts import CoordinatorPart, GatewayPart, InferencePart, TrainerPart
from bombus.config.streams import StreamLimits

Overrides = Mapping[str, Flag]  # by key, such as `gateway.port`; a flag's empty parts come from the key
PARTS: dict[str, type[BaseModel]] = {
    "": Cluster,
    "gateway": GatewayPart,
    "coordinator": CoordinatorPart,
    "streams": StreamLimits,
    "trainer": TrainerPart,
    "inference": InferencePart,
}
STREAM_FLAGS: Overrides = {f"streams.{field}": Flag() for field in StreamLimits.model_fields}


def add_overrides(parser: argparse.ArgumentParser, flags: Overrides) -> None:
    """Add these flags. Several keys may share a flag."""
    for argument in {argument.name: argument for argument in _arguments(flags)}.values():
        argument.add_to(parser, overrides=True)


def typed_overrides(arguments: argparse.Namespace, flags: Overrides) -> dict[str, Tree]:
    """Return the values of the flags that were typed, as a tree of fields for each part."""
    found: dict[str, Tree] = {part: {} for part in PARTS}
    for argument in _arguments(flags):
        value = getattr(arguments, argument.destination)
        if value is not None:
            part, _, field = argument.path.rpartition(".")
            found[part][field] = value
    return found


def flag_of(arguments: argparse.Namespace, flags: Overrides) -> Callable[[str], str]:
    """Return a function that maps a place in the document to the flag that set its value, or to "" if no flag did."""
    typed = typed_overrides(arguments, flags)
    names = {argument.path: argument.name for argument in _arguments(flags)}

    def flag(place: str) -> str:
        stem, _, field = place.rpartition(".")
        part = stem.rpartition(".")[2].partition("[")[0]
        return names[f"{part}.{field}".lstrip(".")] if field in typed.get(part, ()) else ""

    return flag


def _arguments(flags: Overrides) -> Iterator[FlagArgument]:
    for key, flag in flags.items():
        part, _, name = key.rpartition(".")
        field = PARTS[part].model_fields[name]
        yield FlagArgument(key, field, flag.over(flag_in(field)))
