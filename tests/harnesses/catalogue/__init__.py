"""The harnesses, as data: how each is started, what it is pointed with, and what is expected of an episode."""

from tests.harnesses.catalogue.clients import CLIENTS
from tests.harnesses.catalogue.command_lines import COMMAND_LINES
from tests.harnesses.catalogue.frameworks import FRAMEWORKS
from tests.harnesses.catalogue.harness import Dialect, Harness

HARNESSES: tuple[Harness, ...] = (*COMMAND_LINES, *FRAMEWORKS, *CLIENTS)

__all__ = ["HARNESSES", "Dialect", "Harness"]
