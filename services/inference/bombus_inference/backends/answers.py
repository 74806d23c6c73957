"""Turns a server's answers into frames: tokens, their logprobs, spans of policy versions, and prompt scores.

Pure: uses no connection and no clock. An impossible answer raises `BackendFailed`, since nothing is guessed.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bombus.hive.generation import SCORES_A_FRAME_MAX, Finished, Frame, Generate, PromptScores, Tokens
from bombus.hive.records import FinishReason, pack_logprobs, pack_tokens
from bombus_inference.backends.http_calls import BackendFailed
from bombus_inference.backends.protocol import TopLogprobs

NO_PROBABILITY = -9998.0  # vLLM writes minus infinity as -9999, because JSON has no infinity


@dataclass(slots=True)
class ChoiceDelta:
    """The part of one choice's answer that arrived in one event. `tops` has one row per token, or is empty."""

    choice: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[TopLogprobs] = ()
    finish: str | None = None
    versions: Sequence[int] | None = None  # one for each token of this choice so far, if the server reports them
    cached_prompt_tokens: int = 0


@dataclass(slots=True)
class _Choice:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)
    sent: int = 0
    finished: bool = False


class FrameAssembler:
    """Builds the frames of one request as its answer arrives. `version` is the version that was served when the request
    was sent.

    `completion_max` is the number of tokens requested from the server. A choice that ends earlier without a stop token
    was cut off, whatever the server says.

    As long as `only_version()` is true, no other version can have sampled the tokens, and they are passed on
    immediately. After that, tokens are held back until the end of the answer, when the server reports which version
    sampled which tokens.
    """

    def __init__(self, request: Generate, version: int, only_version: Callable[[], bool], completion_max: int) -> None:
        self._request = request
        self._completion_max = completion_max
        self._version = version
        self._only_version = only_version
        self._choices = [_Choice() for _ in range(request.n)]

    def take(self, delta: ChoiceDelta) -> list[Frame]:
        """Return the frames that can be sent now. Raises `BackendFailed` for an impossible answer."""
        if not 0 <= delta.choice < len(self._choices) or self._choices[delta.choice].finished:
            raise BackendFailed(
                f"the engine answered choice {delta.choice}, which was not requested or has already finished"
            )
        choice = self._choices[delta.choice]
        self._append(choice, delta)
        frames: list[Frame] = []
        if delta.finish is not None:
            choice.finished = True
            frames += self._rest(delta.choice, choice, delta.versions)
            reason = self._reason(delta.finish, len(choice.tokens))
            cached = delta.cached_prompt_tokens
            frames.append(Finished(choice=delta.choice, reason=reason, cached_prompt_tokens=cached))
        elif self._request.stream and delta.tokens and self._only_version():
            frames.append(self._tokens(delta.choice, choice, len(choice.tokens), self._version))
        return frames

    def _append(self, choice: _Choice, delta: ChoiceDelta) -> None:
        if len(delta.logprobs) != len(delta.tokens):
            raise BackendFailed(f"the engine gave {len(delta.tokens)} tokens and {len(delta.logprobs)} logprobs")
        if not all(math.isfinite(logprob) and logprob > NO_PROBABILITY for logprob in delta.logprobs):
            raise BackendFailed(f"the model's logits are not finite at version {self._version}")
        choice.tokens += delta.tokens
        choice.logprobs += delta.logprobs
        if self._request.sampling.top_logprobs:
            if len(delta.tops) != len(delta.tokens):
                raise BackendFailed(f"the engine gave alternatives for {len(delta.tops)} of {len(delta.tokens)} tokens")
            choice.tops += delta.tops

    def _reason(self, finish: str, count: int) -> FinishReason:
        if finish not in (FinishReason.STOP, FinishReason.LENGTH):
            raise BackendFailed(f"the engine stopped midway: {finish}")
        if finish == FinishReason.LENGTH and count < self._completion_max:
            raise BackendFailed(
                f"the engine stopped after {count} of {self._completion_max} tokens and reports that as the length "
                "limit; if its own limit is lower, pass that limit to the replica as --max-model-len"
            )
        return FinishReason(finish)

    def _rest(self, number: int, choice: _Choice, versions: Sequence[int] | None) -> list[Frame]:
        """Return frames with the tokens that have not been sent yet, split where the version changes."""
        count = len(choice.tokens)
        if versions is None:
            if not self._only_version():
                raise BackendFailed("the weights changed, but the engine does not say which ones sampled which tokens")
            versions = [self._version] * count
        if len(versions) != count:
            raise BackendFailed(f"the engine gave versions for {len(versions)} of {count} tokens")
        if any(version != self._version for version in versions[: choice.sent]):
            raise BackendFailed("tokens were sent with a version that did not sample them")
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


def most_likely(tokens: Sequence[tuple[int, float]], count: int) -> TopLogprobs:
    """Return the `count` most likely tokens, leaving out any whose probability is zero."""
    possible = [pair for pair in tokens if pair[1] > NO_PROBABILITY]
    return tuple(sorted(possible, key=lambda pair: -pair[1])[:count])


def score_frames(
    logprobs: "array[float]", top_tokens: "array[int]", top_logprobs: "array[float]", width: int, version: int
) -> list[PromptScores]:
    """Return the frames with the scores of a prompt: `logprobs`, one per token, and `width` alternatives for each
    token."""
    frames = []
    for start in range(0, len(logprobs), SCORES_A_FRAME_MAX):
        end = start + SCORES_A_FRAME_MAX
        frames.append(
            PromptScores(
                start=start,
                version=version,
                logprobs=logprobs[start:end].tobytes(),
                width=width,
                top_tokens=top_tokens[start * width : end * width].tobytes(),
                top_logprobs=top_logprobs[start * width : end * width].tobytes(),
            )
        )
    return frames
