"""The state of one completion: its tokens, its blocks in the KV cache, and the frames not yet sent."""

import math
import random
from array import array

from bombus.hive.generation import Finished, Frame, Generate, Tokens
from bombus.hive.records import FinishReason, spans_of
from bombus_inference.backends.protocol import TopLogprobs
from bombus_inference.backends.torch.edits import LogitEdits
from bombus_inference.backends.torch.prompt_scores import PromptScoring
from bombus_inference.backends.torch.sampling import Draw


class SequenceState:
    """One completion: choice number `choice` of the request with this ticket.

    `blocks` hold the keys and values of the first `computed` tokens. `parent` is the name of the last remembered block,
    or None once no more blocks may be remembered. `block_owner` identifies the sequence as the holder of its blocks,
    and is replaced when the sequence gives its blocks back.
    """

    __slots__ = (
        "_draw",
        "_edits",
        "_rng",
        "_scores_sent",
        "_sent",
        "block_owner",
        "blocks",
        "cached",
        "choice",
        "computed",
        "finish",
        "logprobs",
        "parent",
        "prompt_tokens",
        "remembered",
        "request",
        "scoring",
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
        self.tokens_max = tokens_max  # for prompt and completion together
        self.computed = 0
        self.blocks: list[int] = []
        self.remembered = 0
        self.block_owner = object()
        self.parent: int | None = None
        self.cached: int | None = None  # prompt tokens that were in the cache when the sequence was first admitted
        self.logprobs = array("f")
        self.versions: list[int] = []
        self.tops: list[TopLogprobs] = []
        self.finish: FinishReason | None = None
        self._sent = 0
        # The first choice scores the prompt for all choices.
        scores = request.prompt_logprobs and choice == 0
        self.scoring = PromptScoring(prompt, request.top_prompt) if scores else None
        self._scores_sent = False
        seed = request.sampling.seed
        # The random numbers depend on the seed and the choice alone, not on what else is running.
        self._rng = random.Random(None if seed is None else f"{seed}/{choice}")
        sampling = request.sampling
        self._edits = LogitEdits.of(sampling, prompt)
        self._draw = Draw(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            uniform=0.0,
            top_logprobs=sampling.top_logprobs,
            min_p=sampling.min_p,
            edits=self._edits,
            plain=request.plain_logprobs,
        )

    @property
    def missing(self) -> int:
        """The number of tokens to compute before the next one can be drawn; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def generates(self) -> bool:
        """Whether tokens are drawn after the prompt; otherwise the prompt is only scored."""
        return self.tokens_max > self.prompt_tokens

    @property
    def is_scoring(self) -> bool:
        """Whether some scores of the prompt are still missing."""
        return self.scoring is not None and not self.scoring.complete

    def score_again(self) -> None:
        """Forget the unfinished scores of a prompt that is recomputed from its start, perhaps with other weights."""
        if self.scoring is not None and not self.scoring.complete:
            self.scoring.restart()

    @property
    def started(self) -> bool:
        return bool(self.versions)

    def draw(self) -> Draw:
        """Return how to draw the next token. Each call uses up one random number, unless sampling is greedy."""
        draw = self._draw
        if draw.temperature == 0:
            return draw
        uniform = self._rng.random()
        return Draw(
            draw.temperature, draw.top_p, draw.top_k, uniform, draw.top_logprobs, draw.min_p, draw.edits, draw.plain
        )

    def accept(self, token: int, logprob: float, top: TopLogprobs, version: int) -> None:
        """Append a drawn token, and finish if it is a stop token or the last token allowed."""
        assert math.isfinite(logprob)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self._edits is not None:
            self._edits.accept(token)
        if self._draw.top_logprobs:
            self.tops.append(top)
        if token in self.request.sampling.stop_token_ids:
            self.finish = FinishReason.STOP
        elif len(self.tokens) >= self.tokens_max:
            self.finish = FinishReason.LENGTH

    def end_unsampled(self) -> None:
        """Finish after the prompt, because no tokens were requested."""
        self.finish = FinishReason.LENGTH

    def take_frames(self) -> list[Frame]:
        """Return the frames to send now: everything new if streaming, otherwise everything once the sequence has
        finished."""
        frames: list[Frame] = []
        if self.request.stream or self.finish is not None:
            if self.scoring is not None and self.scoring.complete and not self._scores_sent:
                frames += self.scoring.frames()
                self._scores_sent = True
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
            frames.append(Finished(choice=self.choice, reason=self.finish, cached_prompt_tokens=self.cached or 0))
        return frames
