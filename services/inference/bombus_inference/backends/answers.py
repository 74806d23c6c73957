"""Frames out of what an engine behind HTTP says: tokens, a logprob each, and spans of policy versions.

Pure: no connection and no clock. What an engine may not say is an error here, never a guess.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bombus.hive.generation import Finished, Frame, Generate, Tokens
from bombus.hive.records import FinishReason, pack_logprobs, pack_tokens
from bombus_inference.backends.http_calls import BackendFailed
from bombus_inference.backends.protocol import TopLogprobs

NO_PROBABILITY = -9998.0  # vLLM writes minus infinity as -9999, which JSON has a word for


@dataclass(slots=True)
class ChoiceDelta:
    """What came for one choice at once. `tops` has a row for each token, or is empty."""

    choice: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[TopLogprobs] = ()
    finish: str | None = None
    versions: Sequence[int] | None = None  # of all tokens of this choice so far, where the engine says so
    cached_prompt_tokens: int = 0


@dataclass(slots=True)
class _Choice:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)
    sent: int = 0
    finished: bool = False


class FrameAssembler:
    """One request's answer as it comes. `version` is that under which it was asked.

    Tokens go out at once with that version as long as `settled()` says that no other can have sampled them. From then
    on they are held back until the engine says at the end which version sampled which.
    """

    def __init__(self, request: Generate, version: int, with_precision: Callable[[], bool]) -> None:
        self._request = request
        self._version = version
        self._settled = with_precision
        self._choices = [_Choice() for _ in range(request.n)]

    def take(self, portion: ChoiceDelta) -> list[Frame]:
        """The frames that can go out now. Raises `BackendFailed` for an answer that cannot be right."""
        if not 0 <= portion.choice < len(self._choices) or self._choices[portion.choice].finished:
            raise BackendFailed(f"the engine answered choice {portion.choice}, which was not asked for or is over")
        choice = self._choices[portion.choice]
        self._append(choice, portion)
        frames: list[Frame] = []
        if portion.finish is not None:
            choice.finished = True
            frames += self._rest(portion.choice, choice, portion.versions)
            reason = _reason(portion.finish)
            cached = portion.cached_prompt_tokens
            frames.append(Finished(choice=portion.choice, reason=reason, cached_prompt_tokens=cached))
        elif self._request.stream and portion.tokens and self._settled():
            frames.append(self._tokens(portion.choice, choice, len(choice.tokens), self._version))
        return frames

    def _append(self, choice: _Choice, portion: ChoiceDelta) -> None:
        if len(portion.logprobs) != len(portion.tokens):
            raise BackendFailed(f"the engine gave {len(portion.tokens)} tokens and {len(portion.logprobs)} logprobs")
        if not all(math.isfinite(logprob) and logprob > NO_PROBABILITY for logprob in portion.logprobs):
            raise BackendFailed(f"the model's logits are not finite at version {self._version}")
        choice.tokens += portion.tokens
        choice.logprobs += portion.logprobs
        if self._request.sampling.top_logprobs:
            if len(portion.tops) != len(portion.tokens):
                raise BackendFailed(
                    f"the engine gave alternatives for {len(portion.tops)} of {len(portion.tokens)} tokens"
                )
            choice.tops += portion.tops

    def _rest(self, number: int, choice: _Choice, versions: Sequence[int] | None) -> list[Frame]:
        """What was not sent yet, cut where the version changes."""
        count = len(choice.tokens)
        if versions is None:
            if not self._settled():
                raise BackendFailed("the weights changed, and the engine does not say which tokens they sampled")
            versions = [self._version] * count
        if len(versions) != count:
            raise BackendFailed(f"the engine gave versions for {len(versions)} of {count} tokens")
        if any(version != self._version for version in versions[: choice.sent]):
            raise BackendFailed("tokens went out under a version that did not sample them")
        frames: list[Frame] = []
        while choice.sent < count:
            version = versions[choice.sent]
            end = next((at for at in range(choice.sent, count) if versions[at] != version), count)
            frames.append(self._tokens(number, choice, end, version))
        return frames

    def _tokens(self, number: int, choice: _Choice, end: int, version: int) -> Tokens:
        start, choice.sent = choice.sent, end
        return Tokens(
            choice=number,
            version=version,
            tokens=pack_tokens(choice.tokens[start:end]),
            logprobs=pack_logprobs(choice.logprobs[start:end]),
            top=tuple(choice.tops[start:end]),
        )


def _reason(finish: str) -> FinishReason:
    if finish not in (FinishReason.STOP, FinishReason.LENGTH):
        raise BackendFailed(f"the engine gave up in the middle: {finish}")
    return FinishReason(finish)


def likeliest(tokens: Sequence[tuple[int, float]], count: int) -> TopLogprobs:
    """The `count` likeliest of these, those of no probability left out."""
    possible = [pair for pair in tokens if pair[1] > NO_PROBABILITY]
    return tuple(sorted(possible, key=lambda pair: -pair[1])[:count])
