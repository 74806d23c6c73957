"""What a simulated harness needs of a dialect, and how all of them read a stream."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tests.histories.entries import Entry, Said, Style

Json = dict[str, Any]
MODEL = "policy"


@dataclass(frozen=True)
class Ask:
    """What is asked for: a conversation, and how. `continues` is the id of the call that comes before the entries."""

    entries: tuple[Entry, ...]
    tools: tuple[str, ...] = ()
    stops: bool = False
    stream: bool = False
    continues: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the body, such as those of an auxiliary call


class AuxiliaryCall(NamedTuple):
    """A call that a harness makes on its own account, and how it shows that.

    `system` and `user` are what it says, `appended` whether it follows the main conversation.
    """

    purpose: str
    system: str = ""
    user: str = ""
    appended: bool = False
    headers: Mapping[bytes, bytes] = {}
    fields: Mapping[str, Any] = {}


class Dialect(Protocol):
    """A wire format as a client has it. `continues`: whether a request may name an earlier call."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...

    @property
    def continues(self) -> bool: ...

    @property
    def joins_users(self) -> bool:
        """Whether messages of the user that follow each other are one."""
        ...

    @property
    def auxiliary_calls(self) -> Sequence[AuxiliaryCall]: ...

    def names(self, said: Said, style: Style) -> bool:
        """Return whether an answer in this style says which one it is, by more than the ids of its calls."""
        ...

    def body(self, ask: Ask, chance: random.Random) -> Json:
        """Return a request. What `chance` decides does not change what it says."""
        ...

    def whole(self, body: bytes) -> Said:
        """Read a whole answer."""
        ...

    def streamed(self, body: bytes) -> Said:
        """Read an answer from the events of its stream, as an SDK does."""
        ...


def events(body: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the events of a stream: the name, where it has one, and the data. Each must be whole."""
    assert body.endswith(b"\n\n"), body[-200:]
    for block in body.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        yield lines.get("event", ""), data if data == "[DONE]" else json.loads(data)


def function(name: str) -> Json:
    return {"name": name, "description": f"Do {name}.", "parameters": {"type": "object"}}


def in_pieces(text: str, chance: random.Random) -> list[str]:
    """Return a text in one to three pieces."""
    cuts = sorted(chance.sample(range(1, len(text)), min(2, len(text) - 1))) if len(text) > 1 else []
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
