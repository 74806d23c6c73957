"""An ended episode as it travels to its client, and as what a training operation takes of it.

A line is what one conversation of the episode had come to. Its data are shifted by one: token i predicts target i.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress
from math import isfinite
from typing import TYPE_CHECKING

import msgspec

from bombus.config.algorithms import Estimator
from bombus.datums.advantages import call_advantages
from bombus.datums.lines import CallLine, choice_of, lines_of
from bombus.errors import LogCorrupted
from bombus.hive.decoding import decoded
from bombus.hive.records import CallRecord, unpack_tokens

if TYPE_CHECKING:
    import tinker


class LearntLine(msgspec.Struct, frozen=True):
    """A line up to its last token that is learnt: `tokens` (int32), and of equal length what is known of each.

    `logprobs` (float32) and `calls` (int32), the number of the call that sampled it, are 0 and -1 where nothing was
    sampled. `mask` has a byte for each token, 1 where it is learnt here.
    """

    tokens: bytes
    logprobs: bytes
    calls: bytes
    mask: bytes

    @property
    def size(self) -> int:
        return len(self.tokens) + len(self.logprobs) + len(self.calls) + len(self.mask)


class EndedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An ended episode with its lines. `sampler` is the path of what its `calls` calls have sampled from.

    `call_rewards`, where there are any, has one for each of them.
    """

    episode_uuid: str
    task_id: str
    reward: float
    calls: int
    lines: tuple[LearntLine, ...]
    sampler: str = ""
    call_rewards: tuple[float, ...] | None = None


class EpisodeDatum(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an episode as a loss takes it: N tokens, and for each the target that comes after it.

    The sampler's `logprobs`, at temperature 1, and `advantages` are 0 where `mask` is: at targets that were not
    sampled, or are learnt in another line. `episode` is the id with which it was claimed.
    """

    episode: str
    task: str
    reward: float
    sampler: str
    tokens: list[int]
    target_tokens: list[int]
    logprobs: list[float]
    mask: list[float]
    advantages: list[float]

    def to_tinker(self) -> "tinker.Datum":
        """Return it as the `tinker` SDK takes it, for `importance_sampling`, `ppo`, `cispo` or `dro`."""
        from tinker import types

        inputs = {"target_tokens": self.target_tokens, "logprobs": self.logprobs, "advantages": self.advantages}
        return types.Datum(model_input=types.ModelInput.from_ints(self.tokens), loss_fn_inputs=inputs)


def learnt_lines(records: Sequence[CallRecord], context: Sequence[CallRecord] = ()) -> tuple[LearntLine, ...]:
    """Return what is learnt of an episode's calls: see `lines_of`. Raises `LogCorrupted`."""
    found = (_learnt(line, records) for line in lines_of(records, context).lines)
    return tuple(line for line in found if line is not None)


def _learnt(line: CallLine, records: Sequence[CallRecord]) -> LearntLine | None:
    length = len(line.tokens) // 4
    logprobs, mask = bytearray(4 * length), bytearray(length)
    calls = array("i", [-1]) * length
    for span in line.spans:
        logprobs[4 * span.start : 4 * span.end] = choice_of(records, span).logprobs
        calls[span.start : span.end] = array("i", [span.call]) * (span.end - span.start)
        mask[span.start : span.end] = bytes([span.learnt]) * (span.end - span.start)
    mask[:1] = bytes(min(length, 1))  # nothing comes before the first token, so nothing can predict it
    end = mask.rfind(1) + 1
    if not end:
        return None
    if not all(map(isfinite, compress(array("f", bytes(logprobs)), mask))):
        raise LogCorrupted(f"call {records[line.spans[-1].call].id}: a sampled token's logprob is not finite")
    return LearntLine(line.tokens[: 4 * end], bytes(logprobs[: 4 * end]), calls[:end].tobytes(), bytes(mask[:end]))


def read_ended(episodes: Sequence[object]) -> list[EndedEpisode]:
    """Return the episodes of a gateway's answer. Raises `msgspec.MsgspecError` for what is not one."""
    return decoded(lambda found: msgspec.convert(found, list[EndedEpisode]), episodes)


def datums_of(episodes: Sequence[EndedEpisode], estimator: Estimator = Estimator.DR_GRPO) -> list[EpisodeDatum]:
    """Return the lines of episodes with their advantages, which compare those of one task and sampler with each other.

    Raises `ValueError` for an estimator that compares whole batches.
    """
    if estimator.over_batch:
        raise ValueError(
            f"{estimator} is normalised over the tokens of a whole batch: choose {Estimator.DR_GRPO}, "
            f"{Estimator.GRPO}, {Estimator.RLOO} or {Estimator.OPO}, or compute advantages from the rewards"
        )
    groups: dict[tuple[str, str], list[EndedEpisode]] = {}
    for episode in episodes:
        groups.setdefault((episode.task_id, episode.sampler), []).append(episode)
    return [datum for group in groups.values() for datum in _datums(group, estimator)]


def _datums(group: Sequence[EndedEpisode], estimator: Estimator) -> Iterator[EpisodeDatum]:
    found = call_advantages(
        [episode.reward for episode in group],
        [episode.call_rewards for episode in group],
        [_lengths(episode) for episode in group],
        estimator,
    )
    for episode, advantages in zip(group, found, strict=True):
        for line in episode.lines:
            yield _datum(episode, line, advantages)


def _lengths(episode: EndedEpisode) -> list[int]:
    """Return how many tokens are learnt of each call."""
    counts = Counter(call for line in episode.lines for call in compress(array("i", line.calls), line.mask))
    return [counts[call] for call in range(episode.calls)]


def _datum(episode: EndedEpisode, line: LearntLine, advantages: Sequence[float]) -> EpisodeDatum:
    tokens, mask = unpack_tokens(line.tokens), line.mask[1:]
    logprobs, calls = array("f", line.logprobs)[1:], array("i", line.calls)[1:]
    return EpisodeDatum(
        episode=episode.episode_uuid,
        task=episode.task_id,
        reward=episode.reward,
        sampler=episode.sampler,
        tokens=tokens[:-1],
        target_tokens=tokens[1:],
        logprobs=[logprob if learnt else 0.0 for logprob, learnt in zip(logprobs, mask, strict=True)],
        mask=[float(learnt) for learnt in mask],
        advantages=[advantages[call] if learnt else 0.0 for call, learnt in zip(calls, mask, strict=True)],
    )
