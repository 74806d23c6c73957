"""Scores sequences with vLLM, each through a separate request whose prompt is the sequence.

vLLM recomputes such a prompt even if it is cached, and must also sample a token, which is discarded.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from bombus.hive.generation import PromptScores
from bombus_inference.backends.answers import NO_PROBABILITY, most_likely, score_frames
from bombus_inference.backends.http_calls import BackendFailed
from bombus_inference.backends.protocol import TopLogprobs
from bombus_inference.backends.wire import ScoredToken, ServerAnswer


class ScoredAnswer(ServerAnswer):
    """An answer with scores: for each prompt token but the first, the token's own score and the scores of the most
    likely tokens."""

    prompt_logprobs: list[dict[int, ScoredToken] | None] | None = None


_answers = msgspec.json.Decoder(ScoredAnswer)
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """A sequence's logprobs at temperature 1, for all tokens but the first, and the alternatives to each of those
    tokens."""

    logprobs: list[float]
    tops: list[TopLogprobs]

    def frames(self, width: int, version: int) -> list[PromptScores]:
        """Return the frames with these scores. The first token has no score, since nothing comes before it."""
        pairs = [(0, math.nan)] * width + [pair for row in self.tops for pair in row]
        logprobs, tokens = array("f", [math.nan, *self.logprobs]), array("i", [token for token, _ in pairs])
        return score_frames(logprobs, tokens, array("f", [logprob for _, logprob in pairs]), width, version)


def scoring_body(tokens: Sequence[int], width: int, model: str) -> bytes:
    """Return the body of a request that scores `tokens`, with `width` alternatives to each."""
    parameters = {"max_tokens": 1, "prompt_logprobs": width, "ignore_eos": True, "detokenize": False}
    return _encoder.encode({"model": model, "token_ids": tokens, "sampling_params": parameters})


def parse_scores(data: bytes, tokens: Sequence[int], width: int) -> ScoredSequence:
    """Parse the answer to such a request. Raises `BackendFailed` for an impossible answer."""
    answer = _answers.decode(data)
    answer.check()
    rows = answer.prompt_logprobs or []
    if len(rows) != len(tokens):
        raise BackendFailed(f"the engine scored {len(rows)} of {len(tokens)} tokens")
    logprobs, tops = [], []
    for token, row in zip(tokens[1:], rows[1:]):
        own = (row or {}).get(token)
        if own is None or not math.isfinite(own.logprob) or own.logprob <= NO_PROBABILITY:
            raise BackendFailed(f"the engine has no score for token {token}: the model's logits are not finite numbers")
        alternatives = [(each, scored.logprob) for each, scored in (row or {}).items()]
        likely = most_likely(alternatives, width)
        if len(likely) != width:
            raise BackendFailed(f"the engine gave {len(likely)} of {width} alternatives")
        logprobs.append(own.logprob)
        tops.append(likely)
    return ScoredSequence(logprobs, tops)
