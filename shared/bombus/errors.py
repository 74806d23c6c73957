"""The errors that bombus raises on purpose.

    BombusError
    ├── Refused            a request was understood and declined: a stable code, a sentence, an HTTP status
    ├── BusUnavailable     the bus cannot be reached, or is full: try again later
    ├── Deposed            another coordinator has become the leader
    ├── LogCorrupted       the log contradicts itself (a reference that does not match, a gap)
    │   └── StreamEndLost  a stream has lost messages that were read or stored there before
    └── EngineFault        a model, tokenizer or device cannot do what was requested

A refusal tells the caller what to do next. Bugs raise other exceptions, which crash the process.
"""

import traceback
from enum import StrEnum
from functools import cache
from pathlib import Path

FOREIGN_TEXT_MAX = 300  # the most characters shown of an error that other code raised


class Code(StrEnum):
    """Stable names of refusals. Clients may match on these; the sentences may change."""

    MALFORMED = "malformed"
    UNKNOWN_FIELD = "unknown_field"
    UNSUPPORTED = "unsupported"
    BAD_CONFIG = "bad_config"
    BAD_REWARD = "bad_reward"
    TOO_LARGE = "too_large"
    PROMPT_TOO_LONG = "prompt_too_long"
    BAD_KEY = "bad_key"
    KEY_EXPIRED = "key_expired"
    UNKNOWN_HOST = "unknown_host"
    UNKNOWN_ENGINE = "unknown_engine"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_EPISODE = "unknown_episode"
    UNKNOWN_CALL = "unknown_call"
    UNKNOWN_PATH = "unknown_path"
    EPISODE_OVER = "episode_over"
    NOT_YOUR_EPISODE = "not_your_episode"
    OTHER_OUTCOME = "other_outcome"
    OTHER_CLAIM = "other_claim"
    UNKNOWN_SESSION = "unknown_session"
    UNKNOWN_ENVIRONMENT = "unknown_environment"
    SESSION_OVER = "session_over"
    MODEL_EXISTS = "model_exists"
    OTHER_BODY = "other_body"
    BODY_GONE = "body_gone"
    QUOTA = "quota"
    WRONG_PHASE = "wrong_phase"
    NOT_ACTIVE = "not_active"
    ENGINE_FAILED = "engine_failed"
    NO_EPISODES = "no_episodes"
    NO_CONFIG = "no_config"
    NO_CALLS = "no_calls"
    NO_SNAPSHOT = "no_snapshot"
    NO_REPLICA = "no_replica"
    OVERLOADED = "overloaded"
    STORAGE_FULL = "storage_full"
    BUS_DOWN = "bus_down"
    TIMEOUT = "timeout"
    INTERNAL = "internal"


STATUS: dict[Code, int] = {
    Code.MALFORMED: 400,
    Code.UNKNOWN_FIELD: 400,
    Code.UNSUPPORTED: 400,
    Code.BAD_CONFIG: 400,
    Code.BAD_REWARD: 400,
    Code.TOO_LARGE: 413,
    Code.PROMPT_TOO_LONG: 400,
    Code.BAD_KEY: 401,
    Code.KEY_EXPIRED: 401,
    Code.UNKNOWN_HOST: 421,
    Code.UNKNOWN_ENGINE: 404,
    Code.UNKNOWN_MODEL: 404,
    Code.UNKNOWN_EPISODE: 400,
    Code.UNKNOWN_CALL: 404,
    Code.UNKNOWN_PATH: 404,
    Code.EPISODE_OVER: 403,
    Code.NOT_YOUR_EPISODE: 404,
    Code.OTHER_OUTCOME: 409,
    Code.OTHER_CLAIM: 409,
    Code.UNKNOWN_SESSION: 404,
    Code.UNKNOWN_ENVIRONMENT: 404,
    Code.SESSION_OVER: 410,
    Code.MODEL_EXISTS: 409,
    Code.OTHER_BODY: 409,
    Code.BODY_GONE: 409,
    Code.QUOTA: 429,
    Code.WRONG_PHASE: 400,
    Code.NOT_ACTIVE: 409,
    Code.ENGINE_FAILED: 409,
    Code.NO_EPISODES: 409,
    Code.NO_CONFIG: 409,
    Code.NO_CALLS: 404,
    Code.NO_SNAPSHOT: 409,
    Code.NO_REPLICA: 503,
    Code.OVERLOADED: 503,
    Code.STORAGE_FULL: 503,
    Code.BUS_DOWN: 503,
    Code.TIMEOUT: 503,
    Code.INTERNAL: 500,
}


class BombusError(Exception):
    """The base of all errors that bombus raises on purpose."""


class Refused(BombusError):
    """A request was understood and declined.

    `why` is one or two sentences for a person, saying what is wrong and what to do about it.
    """

    def __init__(self, code: Code, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code
        self.why = why

    def __reduce__(self) -> tuple[type["Refused"], tuple[Code, str]]:  # needed when a trainer's ranks exchange refusals
        return type(self), (self.code, self.why)

    @property
    def status(self) -> int:
        return STATUS[self.code]


class BusUnavailable(BombusError):
    """The bus cannot be reached within the time allowed, or a stream is full. Nothing was lost; the caller can try
    again."""


class Deposed(BombusError):
    """Another coordinator has opened a higher epoch on this hive's log."""


class LogCorrupted(BombusError):
    """A message on the log does not match its reference, or cannot be decoded."""


class StreamEndLost(LogCorrupted):
    """`stream` has lost its end: message `known` is gone, or another message now has its sequence number.

    This happens after a power cut, or if the stream was replaced by an older copy (R6).
    """

    def __init__(self, stream: str, known: int) -> None:
        super().__init__(
            f"{stream} has lost its end, in a power cut or because an older copy replaced it: message {known} is gone "
            "or is a different one now"
        )
        self.stream = stream
        self.known = known


class NewerEvent(LogCorrupted):
    """An event has a kind or a value that is unknown to this version. The error's sentence says what to upgrade."""


class NewerLevel(BombusError):
    """The log is at a feature level that this version does not know, so this version must not take part."""


class EngineFault(BombusError):
    """A model, tokenizer, checkpoint or device cannot do what was requested."""


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, which some file names contain, with `?`, so that UTF-8 can encode the text."""
    return text.encode(errors="replace").decode()


def in_one_line(error: BaseException) -> str:
    """Return the type and text of an error that other code raised, shortened and without line breaks."""
    try:
        said = str(error)
    except Exception as failed:  # raised by the error's own `__str__`: it must be reported all the same
        said = f"its text is not available: str() raised {type(failed).__name__}"
    text = " ".join(without_surrogates(said).split())
    return f"{type(error).__name__}: {text[:FOREIGN_TEXT_MAX]}" if text else type(error).__name__


def with_place(error: BaseException) -> str:
    """Return `in_one_line` with the innermost file and line that belong to the program itself, rather than to a
    library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_libraries())]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return in_one_line(error) + place


@cache
def _libraries() -> tuple[str, ...]:
    """Return the path prefixes of files that do not belong to the program itself."""
    import sysconfig  # imported late: it takes a few milliseconds, and every program imports this module

    folders = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    return "<frozen", str(Path(__file__).parent), *folders
