"""Checks a replica's frames before they are used, so that no answer that does not fit its request is ever recorded."""

from array import array
from collections.abc import Callable, Iterable
from math import inf

from bombus.hive.generation import Finished, Frame, Generate, PromptScores, Tokens
from bombus.hive.records import FinishReason
from bombus_gateway.call.replica_client import ReplicaGone

LOGPROB_MAX = 1e-3  # rounding makes the logprob of a certain token slightly positive
VERSIONS_AHEAD = 1  # a replica may learn about new weights before this gateway does
ID_BYTES = 4  # size of a token id, and of a logprob
REASONS = (FinishReason.STOP, FinishReason.LENGTH)
ENDED = -1


class WrongAnswer(ReplicaGone):
    """Raised when what a replica sent cannot be an answer to the request.

    `of_replica` is false if the request named an adapter, since the adapter's weights may then be to blame.
    """

    def __init__(self, why: str, of_replica: bool) -> None:
        super().__init__(f"a replica's answer is invalid: {why}")
        self.of_replica = of_replica


class AnswerCheck:
    """Checks the frames of one answer, in order. `newest` is a function that returns the engine's newest version."""

    def __init__(self, request: Generate, vocabulary: int, newest: Callable[[], int]) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._newest = newest
        self._sampled = [0] * request.n  # number of tokens in each choice so far; `ENDED` once the choice has ended
        self._unscored = len(request.prompt) // ID_BYTES if request.prompt_logprobs else 0

    def __call__(self, frame: Frame) -> None:
        """Raise `WrongAnswer` for a frame that cannot belong to the answer."""
        if isinstance(frame, Tokens):
            self._check_tokens(frame)
        elif isinstance(frame, Finished):
            self._check_end(frame)
        elif isinstance(frame, PromptScores):
            self._check_scores(frame)

    def _check_tokens(self, frame: Tokens) -> None:
        self._check_choice(frame.choice)
        self._check_version(frame.version)
        self._check_pairs(frame.tokens, frame.logprobs)
        count = len(frame.tokens) // ID_BYTES
        sampled = self._sampled[frame.choice] = self._sampled[frame.choice] + count
        limit = self._request.sampling.max_tokens
        if sampled > limit and (limit or self._request.prompt_logprobs):
            raise self._wrong(f"{sampled} tokens, but at most {limit} were asked for")
        if frame.top:
            if len(frame.top) != count:
                raise self._wrong(f"alternatives for {len(frame.top)} tokens, but {count} tokens")
            pairs = [pair for row in frame.top for pair in row]
            self._check_alternatives([token for token, _ in pairs], [logprob for _, logprob in pairs])

    def _check_end(self, frame: Finished) -> None:
        self._check_choice(frame.choice)
        scored_only = self._request.prompt_logprobs and not self._request.sampling.max_tokens
        if not self._sampled[frame.choice] and not scored_only:
            raise self._wrong(f"choice {frame.choice} has no token, not even one that ends it")
        self._sampled[frame.choice] = ENDED
        if frame.reason not in REASONS:
            raise self._wrong(f"unknown finish reason {frame.reason[:40]!r}")
        if self._unscored:
            raise self._wrong(f"{self._unscored} tokens of the prompt have no logprob")

    def _check_scores(self, frame: PromptScores) -> None:
        self._check_version(frame.version)
        whole = len(self._request.prompt) // ID_BYTES
        count, odd = divmod(len(frame.logprobs), ID_BYTES)
        if odd or frame.start != whole - self._unscored or count > self._unscored:
            raise self._wrong(
                f"logprobs of {count} prompt tokens from {frame.start} on, but {self._unscored} of {whole} are missing"
            )
        self._unscored -= count
        first = int(frame.start == 0)  # the first prompt token has no logprob
        self._check_logprobs(array("f", frame.logprobs)[first:], sampled=False)
        if not len(frame.top_tokens) == len(frame.top_logprobs) == count * frame.width * ID_BYTES:
            raise self._wrong(f"it does not have {frame.width} alternatives for each of its {count} prompt tokens")
        if frame.width:
            skipped = first * frame.width
            self._check_alternatives(array("i", frame.top_tokens)[skipped:], array("f", frame.top_logprobs)[skipped:])

    def _check_choice(self, choice: int) -> None:
        if not 0 <= choice < len(self._sampled):
            raise self._wrong(f"choice {choice} of {len(self._sampled)}, counted from 0")
        if self._sampled[choice] == ENDED:
            raise self._wrong(f"choice {choice} continues after its end")

    def _check_version(self, version: int) -> None:
        newest = self._newest()
        if not 0 <= version <= newest + VERSIONS_AHEAD:
            raise self._wrong(f"version {version}, but the newest is {newest}")

    def _check_pairs(self, tokens: bytes, logprobs: bytes) -> None:
        if len(tokens) != len(logprobs) or len(tokens) % ID_BYTES:
            raise self._wrong(f"{len(logprobs) / ID_BYTES:g} logprobs for {len(tokens) / ID_BYTES:g} tokens")
        if tokens:
            if max(array("I", tokens)) >= self._vocabulary:  # read as unsigned, negative ids become large
                self._check_ids(array("i", tokens))
            self._check_logprobs(array("f", logprobs), sampled=True)

    def _check_ids(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if not 0 <= token < self._vocabulary:
                raise self._wrong(f"token {token}, but the vocabulary has {self._vocabulary} tokens")

    def _check_logprobs(self, logprobs: "array[float]", sampled: bool) -> None:
        """Raise `WrongAnswer` for values that cannot be logprobs. Minus infinity is allowed only for tokens that were
        not sampled.

        The sum shows in one pass whether any value is NaN or minus infinity.
        """
        if not logprobs:
            return
        total = sum(logprobs)
        if max(logprobs) <= LOGPROB_MAX and (total > -inf or (total == -inf and not sampled)):
            return
        odd = next(each for each in logprobs if not each <= LOGPROB_MAX or (sampled and each == -inf))
        raise self._wrong(f"a token has the logprob {odd:g}")

    def _check_alternatives(self, tokens: Iterable[int], logprobs: Iterable[float]) -> None:
        """Raise `WrongAnswer` for alternatives with an invalid id or logprob. Minus infinity is allowed."""
        self._check_ids(tokens)
        for logprob in logprobs:
            if not logprob <= LOGPROB_MAX:
                raise self._wrong(f"an alternative has the logprob {logprob:g}")

    def _wrong(self, why: str) -> WrongAnswer:
        return WrongAnswer(why, of_replica=not self._request.adapter)
