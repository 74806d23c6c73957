"""What can go wrong for a client.

SwarmError                 every refusal: `code` (stable), `status` (HTTP) and a sentence that says what to do
├── ServerUnreachable      no answer, for as long as was allowed
├── ServerBusy             the server asks to come back later, for as long as was allowed
├── BadRequest             the request itself is wrong
│   ├── BadConfig          ... its job
│   └── BadReward          ... its reward
├── Unauthorized           a key that is missing, wrong or out of date
├── WrongPhase             not while the engine is in this phase
│   ├── EngineOffline      the engine is not running; when its run failed the sentence says why
│   └── OtherModel         the engine runs, and trains another model than the job names
├── NoEpisode              no episode became free in time
├── EpisodeGone            the episode is over, or was never there
├── NotYourEpisode         another client holds it
├── OtherOutcome           it has ended already, in another way
└── ServerFault            the server broke; its log has more

InfraError                 raised by an agent's code: an environment broke, no model is to blame
EpisodesFailed             some of many runs failed for good; the others' results are in it
"""

from typing import Any

from bombus.errors import BombusError, Code


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
    """Raise it in an agent when its environment broke: the episode is aborted instead of being scored."""


class EpisodesFailed(BombusError):
    """`results` has None for each run that failed; `failures` maps those places to their errors."""

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


def error_for(status: int, code: str, why: str) -> SwarmError:
    """The error that a refusal becomes: by its code, else by its status."""
    kind = _BY_CODE.get(code)
    if kind is None:
        kind = ServerBusy if status in (429, 502, 503, 504) else ServerFault if status >= 500 else BadRequest
    return kind(why, code, status)
