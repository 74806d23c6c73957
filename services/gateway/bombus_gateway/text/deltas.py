"""The deltas that are read from a completion while it is being generated: text, reasoning and tool calls."""

from typing import Protocol

import msgspec


class TextDelta(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A whole tool call. `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = ""  # empty if the model's format has no ids


Delta = TextDelta | ReasoningDelta | ToolCallDelta


class DeltaReader(Protocol):
    """Reads one completion while it is being generated, and returns its deltas."""

    def feed(self, text: str) -> list[Delta]:
        """Read new text, and return the deltas that can no longer change."""
        ...

    def finish(self) -> list[Delta]:
        """End the completion, and return the deltas that were held back."""
        ...


class PlainReader:
    """Reads a completion as text only."""

    def feed(self, text: str) -> list[Delta]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        return []
