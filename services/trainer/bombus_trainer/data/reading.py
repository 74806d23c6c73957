"""Reads the calls of a batch from the log. If a call cannot be read, only its episode is left out (R6)."""

from dataclasses import dataclass

from bombus.datums.reading import CallReader, ancestors, read_calls
from bombus.errors import LogCorrupted
from bombus.hive.events import BatchEpisode, BatchReady
from bombus.hive.records import CallRecord, CallRef
from bombus_trainer.data.batch import EpisodeCalls, EpisodeGroup


@dataclass(frozen=True)
class ReadBatch:
    """A batch as read from the log.

    `lost` maps each episode or rollout group that was left out, by name, to the reason. `stale` maps each episode that
    is too old, by name, to its age. `gone` has the positions within the batch of the rollout groups whose bodies were
    found to be lost during this read.
    """

    groups: tuple[EpisodeGroup, ...]
    lost: dict[str, str]
    stale: dict[str, int]
    gone: tuple[int, ...] = ()


async def read_batch(
    calls: CallReader, batch: BatchReady, max_staleness: int | None = None, *, auxiliary_calls: bool = False
) -> ReadBatch:
    """Read all calls of a batch, each checked against its reference. Raises `BusUnavailable` if the bus is down.

    Auxiliary calls are only context, unless `auxiliary_calls` is true because the job trains on them. Episodes with a
    token more than `max_staleness` versions old are left out; None means no limit.
    """
    try:
        refs = [ref for group in batch.groups for episode in group.episodes for ref in episode.calls]
        known = await read_calls(calls, refs)
    except LogCorrupted:
        known = {}  # a call is bad; read episode by episode to find which
    groups: list[EpisodeGroup] = []
    lost: dict[str, str] = {}
    stale: dict[str, int] = {}
    for group in batch.groups:
        kept: list[EpisodeCalls] = []
        for episode in group.episodes:
            try:
                read = await _episode(calls, episode, known)
            except LogCorrupted as error:
                lost[episode.episode] = str(error)
                continue
            read = read if auxiliary_calls else read.without_auxiliary_calls()
            age = _age(read, batch.step)
            if max_staleness is not None and age > max_staleness:
                stale[episode.episode] = age
            else:
                kept.append(read)
        groups.append(EpisodeGroup(group.task, tuple(kept)))
    return ReadBatch(tuple(groups), lost, stale)


def _age(episode: EpisodeCalls, step: int) -> int:
    """Return the age of an episode's oldest sampled token, in versions: step k trains version k - 1 (R14)."""
    spans = (span for record in episode.records for choice in record.choices for span in choice.spans)
    return step - 1 - min((span.version for span in spans if span.end > span.start), default=step - 1)


async def _episode(calls: CallReader, episode: BatchEpisode, known: dict[CallRef, CallRecord]) -> EpisodeCalls:
    missing = [ref for ref in episode.calls if ref not in known]
    found = known | await read_calls(calls, missing) if missing else known
    records = tuple(found[ref] for ref in episode.calls)
    return EpisodeCalls(
        episode=episode.episode,
        reward=episode.reward,
        records=records,
        call_rewards=episode.call_rewards,
        context=await ancestors(calls, records),
    )
