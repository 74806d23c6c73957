"""The errors of a client.

    SwarmError              every refusal: `code` (stable), `status` (HTTP) and a sentence that says what to do
    ├── ServerUnreachable   the server did not reply, however often the request was retried
    ├── ServerBusy          the server was busy, however often the request was retried
    ├── BadRequest          the request itself is wrong
    │   ├── BadConfig       the job in it is wrong
    │   └── BadReward       the reward in it is wrong
    ├── Unauthorized        the key is missing, wrong or expired
    ├── WrongPhase          the engine is not in a phase that allows this
    │   ├── EngineOffline   the engine is not running; if its run failed, the sentence says why
    │   └── OtherModel      the engine is running, but trains a different model than the job names
    ├── NoEpisode           no episode became free in time
    ├── EpisodeGone         the episode is over, or never existed
    ├── NotYourEpisode      another client holds the episode
    ├── OtherOutcome        the episode has already ended with another outcome
    └── ServerFault         the server failed; its log says more

Three other errors do not come from the hive:

    NoTaskId                a task has no id
    InfraError              raised by an agent's code: something broke, and the model is not to blame
    EpisodesFailed          some of many runs failed for good; the error contains the results of the others
"""

from typing import Any

from bombus.errors import BombusError, Code
from bombus.hive.failures import FailureKind


class SwarmError(BombusError):
    def __init__(self, why: str, code: str = "", status: int = 0) -> None:
        super().__init__(why)
        self.why = why
        self.code = code
        self.status = status


class ServerUnreachable(SwarmError):
    pass


class ServerBusy(SwarmError):
    pass


class BadRequest(SwarmError):
    pass


class BadConfig(BadRequest):
    pass


class BadReward(BadRequest):
    pass


class NoTaskId(ValueError):
    """A task has no id, so its episodes cannot be compared."""


class Unauthorized(SwarmError):
    pass


class WrongPhase(SwarmError):
    pass


class EngineOffline(WrongPhase):
    pass


class OtherModel(WrongPhase):
    pass


class NoEpisode(SwarmError):
    pass


class EpisodeGone(SwarmError):
    pass


class NotYourEpisode(SwarmError):
    pass


class OtherOutcome(SwarmError):
    pass


class ServerFault(SwarmError):
    pass


class InfraError(BombusError):
    """Raised by an agent if something broke and the model is not to blame: the episode is aborted, not scored.

    `kind` says what broke. By default, this is the tool or the reward if the code of a tool or reward class raises the
    error, and otherwise the environment.
    """

    failure: FailureKind | None = None

    def __init__(self, why: str = "", kind: FailureKind | None = None) -> None:
        super().__init__(why)
        if kind is not None:
            self.failure = FailureKind(kind)

    def attribute_to(self, kind: FailureKind) -> None:
        """Give this error a kind, unless it already has one."""
        self.failure = self.failure or kind


class EpisodesFailed(BombusError):
    """Raised after many runs if some of them failed for good.

    `results` contains None for each run that failed, and `failures` maps the indices of these runs to their errors.
    """

    def __init__(self, results: list[Any], failures: dict[int, Exception]) -> None:
        first = next(iter(failures.values()))
        super().__init__(f"{len(failures)} of {len(results)} runs failed for good, the first with: {first!r}")
        self.results = results
        self.failures = failures


_BY_CODE: dict[str, type[SwarmError]] = {
    Code.BAD_CONFIG: BadConfig,
    Code.BAD_REWARD: BadReward,
    Code.BAD_KEY: Unauthorized,
    Code.KEY_EXPIRED: Unauthorized,
    Code.WRONG_PHASE: WrongPhase,
    Code.NO_CONFIG: WrongPhase,
    Code.NO_EPISODES: NoEpisode,
    Code.UNKNOWN_EPISODE: EpisodeGone,
    Code.EPISODE_OVER: EpisodeGone,
    Code.NOT_YOUR_EPISODE: NotYourEpisode,
    Code.OTHER_OUTCOME: OtherOutcome,
}


def failure_of(error: BaseException) -> FailureKind:
    """Return the kind of failure that an agent's error indicates."""
    match error:
        case InfraError():
            return error.failure or FailureKind.ENVIRONMENT
        case BadReward():
            return FailureKind.GRADER
        case EpisodeGone() | WrongPhase() | ServerUnreachable() | ServerBusy() | ServerFault():
            return FailureKind.HIVE
        case _:
            return FailureKind.CLIENT


def error_for(status: int, code: str, why: str) -> SwarmError:
    """Return the error for a refusal, chosen by its code or else by its status."""
    kind = _BY_CODE.get(code)
    if kind is None:
        kind = ServerBusy if status in (429, 502, 503, 504) else ServerFault if status >= 500 else BadRequest
    return kind(why, code, status)
