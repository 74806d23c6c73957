"""One completion in the making: its tokens, its place in the KV cache, and the frames it still owes its client."""

import math
import random
from array import array

from bombus.hive.generation import Finished, Frame, Generate, Tokens
from bombus.hive.records import FinishReason, spans_of
from bombus_inference.backends.protocol import TopLogprobs
from bombus_inference.backends.torch.sampling import Draw


class SequenceState:
    """Choice number `choice` of the request with this ticket. `computed` tokens have their keys and values in `blocks`.

    `parent` is the remembered name of the last remembered block, None once nothing more is to be remembered. `stay` is
    another object whenever its blocks were given back in between.
    """

    __slots__ = (
        "_draw",
        "_rng",
        "_sent",
        "blocks",
        "choice",
        "computed",
        "finish",
        "found",
        "logprobs",
        "parent",
        "prompt_tokens",
        "remembered",
        "request",
        "stay",
        "ticket",
        "tokens",
        "tokens_max",
        "tops",
        "versions",
    )

    def __init__(self, ticket: int, request: Generate, choice: int, prompt: list[int], tokens_max: int) -> None:
        self.ticket = ticket
        self.request = request
        self.choice = choice
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.tokens_max = tokens_max  # prompt and completion
        self.computed = 0
        self.blocks: list[int] = []
        self.remembered = 0
        self.stay = object()
        self.parent: int | None = None
        self.found: int | None = None  # prompt tokens that were in the cache when it was first admitted
        self.logprobs = array("f")
        self.versions: list[int] = []
        self.tops: list[TopLogprobs] = []
        self.finish: FinishReason | None = None
        self._sent = 0
        seed = request.sampling.seed
        # A choice's numbers are its own: they depend on the seed and on nothing else that runs beside it.
        self._rng = random.Random(None if seed is None else f"{seed}/{choice}")
        sampling = request.sampling
        self._draw = Draw(sampling.temperature, sampling.top_p, sampling.top_k, 0.0, sampling.top_logprobs)

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one can be drawn; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def started(self) -> bool:
        return bool(self.versions)

    def draw(self) -> Draw:
        """How to draw its next token; each call uses up one random number."""
        draw = self._draw
        if draw.temperature == 0:
            return draw
        return Draw(draw.temperature, draw.top_p, draw.top_k, self._rng.random(), draw.top_logprobs)

    def accept(self, token: int, logprob: float, top: TopLogprobs, version: int) -> None:
        """Append a drawn token, and finish when it is a stop token or the last one allowed."""
        assert math.isfinite(logprob)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self._draw.top_logprobs:
            self.tops.append(top)
        if token in self.request.sampling.stop_token_ids:
            self.finish = FinishReason.STOP
        elif len(self.tokens) >= self.tokens_max:
            self.finish = FinishReason.LENGTH

    def take_frames(self) -> list[Frame]:
        """What is to be sent now: every token at once when streaming, all of them at the end when not."""
        frames: list[Frame] = []
        if self.request.stream or self.finish is not None:
            since = self._sent
            for span in spans_of(self.versions[since:]):
                start, end = since + span.start, since + span.end
                frames.append(
                    Tokens(
                        choice=self.choice,
                        version=span.version,
                        tokens=array("i", self.tokens[self.prompt_tokens + start : self.prompt_tokens + end]).tobytes(),
                        logprobs=self.logprobs[start:end].tobytes(),
                        top=tuple(self.tops[start:end]),
                    )
                )
            self._sent = len(self.versions)
        if self.finish is not None:
            frames.append(Finished(choice=self.choice, reason=self.finish, cached_prompt_tokens=self.found or 0))
        return frames
