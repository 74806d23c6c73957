"""What is known of one harness."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from string import Template


class Dialect(StrEnum):
    CHAT = "chat"
    MESSAGES = "messages"
    RESPONSES = "responses"


@dataclass(frozen=True)
class Place:
    """What the command, the variables and the files of a harness may name, as `$url` and so on.

    `url` is the gateway's, without `/v1`; `bin` the folder of the environment's programs, `home` an empty folder.
    """

    url: str
    key: str
    task: str
    workspace: str
    home: str
    bin: str
    programs: str
    way: str

    def filled(self, text: str) -> str:
        return Template(text).substitute(vars(self))


@dataclass(frozen=True, kw_only=True)
class Harness:
    """One harness in one dialect.

    `package` is the name under which `environment` pins its version. `ways` are those in which it can ask for answers:
    where there are two, `$way` of its command says which. `pointed` says in words how a user points it at a gateway.

    `calls` and `sequences` are those of an episode, and `because` says why there is more than one sequence. `caveats`
    says what does not work, `asks` has the hosts that it asks for in vain, and `fails` says why an episode cannot be
    played yet (the test is then expected to fail). `own_retries` is false where a client or program
    that is in the catalogue too sends a call again.
    """

    name: str
    package: str
    environment: str
    dialect: Dialect
    command: tuple[str, ...]
    pointed: str
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # below its home
    ways: tuple[str, ...] = ("streamed",)
    calls: int = 5
    sequences: int = 1
    because: str = ""
    caveats: str = ""
    asks: tuple[str, ...] = ()
    fails: str = ""
    marks_retries: bool = False
    own_retries: bool = True

    @property
    def id(self) -> str:
        return f"{self.name}, {self.dialect}"
