"""Turns the rollout groups of a batch into sequences to train on, leaving out groups that cannot be used."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from bombus.errors import LogCorrupted
from bombus.hive.records import BodyRef
from bombus.hive.trajectories.queue import QueuedGroup
from bombus.hive.trajectories.records import RolloutGroup, decode_group, int_rows
from bombus.hive.trajectories.training import NOT_TRAINED, Handling, handling_of, why_not_trained
from bombus_trainer.data.batch import EpisodeCalls, EpisodeGroup, GivenTokens
from bombus_trainer.data.reading import ReadBatch
from bombus_trainer.data.sequences import TokenSequence


class BodyReader(Protocol):
    """A source of the bodies of groups, such as the parts on the bus."""

    async def fetch(self, ref: BodyRef) -> bytes:
        """Return a body. Raises `LogCorrupted` if the body is gone, or `BusUnavailable` if the bus is down."""
        ...


async def read_rollout_groups(
    bodies: BodyReader, groups: Sequence[QueuedGroup], step: int, tokens_max: int = 0
) -> ReadBatch:
    """Read the groups of a step's batch. Groups that cannot be read or trained on are in `lost`, with the reason.

    Raises `BusUnavailable` if the bus is down.
    """
    found: list[EpisodeGroup] = []
    lost: dict[str, str] = {}
    gone: list[int] = []
    for number, queued in enumerate(groups):
        name = f"{step}.{number}"
        if queued.body is None:
            lost[name] = "its body was lost earlier"
            continue
        try:
            group = decode_group(await bodies.fetch(queued.body))
        except LogCorrupted as error:
            lost[name] = str(error)
            gone.append(number)
            continue
        why = why_not_trained(group, tokens_max)
        if why:  # the group was pushed before this run began, when the trainer's limits were not yet known
            lost[name] = why
        else:
            found.append(group_of(name, group))
    return ReadBatch(tuple(found), lost, {}, tuple(gone))


def group_of(name: str, group: RolloutGroup) -> EpisodeGroup:
    """Convert a group for which `why_not_trained` gives no reason. Each sequence becomes an episode."""
    lengths = group.sequence_lengths()
    tokens, masks = int_rows(group.tokens, lengths), int_rows(group.masks, lengths)
    logprobs = None if group.inference_logprobs is None else group.inference_logprobs.rows(lengths)
    advantages = None if group.advantages is None else group.advantages.rows(lengths)
    (scores,) = group.scores.rows([group.sequences])
    episodes = []
    for number, handling in enumerate(handling_of(group)):
        episode = f"{name}.{number}"
        sequence = _sequence(
            episode, tokens[number], masks[number], None if logprobs is None else logprobs[number], handling
        )
        given = GivenTokens(
            sequence=sequence,
            advantages_T=None
            if advantages is None or sequence is None
            else np.array(advantages[number][: len(sequence)], dtype=np.float32),
            zeroed=handling.zeroed,
        )
        episodes.append(EpisodeCalls(episode=episode, reward=scores[number], records=(), given=given))
    return EpisodeGroup(task=name, episodes=tuple(episodes))


def _sequence(
    episode: str, tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float] | None, handling: Handling
) -> TokenSequence | None:
    """Return a sequence up to its last trained token, or None if it has no trained tokens.

    Logprobs are NaN if the sampler's are unknown. The versions that sampled the tokens are never known (-1).
    """
    mask_T = np.array(masks, dtype=np.int64) != NOT_TRAINED
    mask_T[:1] = False  # nothing comes before the first token, so nothing can predict it
    trained = np.flatnonzero(mask_T)
    if not len(trained):
        return None
    end = int(trained[-1]) + 1
    mask_T = mask_T[:end]
    logprobs_T = np.full(end, np.nan, dtype=np.float32)
    if logprobs is not None:
        logprobs_T = np.array(logprobs[:end], dtype=np.float32)
    return TokenSequence(
        episode=episode,
        tokens_T=np.array(tokens[:end], dtype=np.int64),
        loss_mask_T=mask_T,
        logprobs_T=np.where(mask_T, logprobs_T, np.float32(0.0)),
        versions_T=np.full(end, -1, dtype=np.int64),
        calls_T=np.where(mask_T, 0, -1),
        temperatures_T=np.full(end, handling.temperature, dtype=np.float32),
    )
