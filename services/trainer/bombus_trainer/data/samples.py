"""Converts a batch to samples in the format of slime's debug rollout data, with values for each token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import msgspec

from bombus.hive.records import CallRecord, FinishReason
from bombus_trainer.data.batch import EpisodeCalls, EpisodeGroup, PreparedBatch, PreparedSequence
from bombus_trainer.data.sequences import TokenSequence

Decode = Callable[[Sequence[int]], str]
OURS = "bombus"  # our own key in `metadata`; the rest is the client's metadata about the episode


class Status(StrEnum):
    """A sample's status. slime has others, but a sequence that was trained on has one of these two."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"


class Origin(msgspec.Struct, frozen=True):
    """The step that trained on a batch."""

    engine: str
    run: int
    step: int


@dataclass
class Sample:
    """One sequence: a branch of an episode, cut after its last trained token.

    The response begins at the first trained token. `loss_mask` and `rollout_log_probs` have an entry for each of the
    response's tokens; the logprob of a token that was not sampled is 0. `metadata["bombus"]` has advantages,
    temperatures and policy versions (-1: not sampled) of the same length, and the origin of the sample.
    """

    group_index: int
    index: int
    prompt: str
    tokens: list[int]
    response: str
    response_length: int
    label: str | None
    reward: float
    loss_mask: list[int]
    rollout_log_probs: list[float]
    weight_versions: list[str]
    status: Status
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values only, because `torch.load(weights_only=True)` refuses anything else."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"status": str(self.status)}


def samples_of(
    origin: Origin,
    groups: Sequence[EpisodeGroup],
    prepared: PreparedBatch,
    decode: Decode | None = None,
    client_metadata: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Sample]:
    """Return the samples of a batch that `prepare` made from these groups. An episode without trained tokens has no
    samples.

    Without `decode`, the texts are empty. `client_metadata` maps episodes to their clients' metadata, whose `label`
    becomes the sample's label. Samples have no advantages if verl still has to compute them.
    """
    samples: list[Sample] = []
    for index, (group, ready) in enumerate(zip(groups, prepared.groups, strict=True)):
        episodes = {episode.episode: episode for episode in group.episodes}
        branches: dict[str, int] = {}
        for entry in ready.sequences:
            episode = episodes[entry.sequence.episode]
            branch = branches[episode.episode] = branches.get(episode.episode, -1) + 1
            ours = {**msgspec.to_builtins(origin), "task": group.task, "episode": episode.episode, "branch": branch}
            metadata = {
                **(client_metadata or {}).get(episode.episode, {}),
                OURS: ours | _token_metadata(entry, episode, prepared.is_estimated),
            }
            place = _SamplePlace(group=index, index=len(samples), metadata=metadata)
            samples.append(_sample(place, entry, episode, decode))
    return samples


@dataclass(frozen=True)
class _SamplePlace:
    """A sample's position in its batch, and all of its metadata."""

    group: int
    index: int
    metadata: dict[str, Any]


def _token_metadata(entry: PreparedSequence, episode: EpisodeCalls, is_estimated: bool) -> dict[str, Any]:
    """Return our metadata about each token of a sample's response."""
    sequence = entry.sequence
    start = int(sequence.loss_mask_T.argmax())
    found: dict[str, Any] = {
        **({"advantages": entry.advantages_T[start:].tolist()} if is_estimated else {}),
        "temperatures": sequence.temperatures_T[start:].tolist(),
        "versions": sequence.versions_T[start:].tolist(),
    }
    if episode.call_rewards is not None:
        found |= {"call_rewards": list(episode.call_rewards), "calls": sequence.calls_T[start:].tolist()}
    return found


def _sample(place: _SamplePlace, entry: PreparedSequence, episode: EpisodeCalls, decode: Decode | None) -> Sample:
    sequence = entry.sequence
    start = int(sequence.loss_mask_T.argmax())
    tokens = sequence.tokens_T.tolist()
    versions = set(sequence.versions_T[start:].tolist())
    label = place.metadata.get("label")
    return Sample(
        group_index=place.group,
        index=place.index,
        prompt=decode(tokens[:start]) if decode else "",
        tokens=tokens,
        response=decode(tokens[start:]) if decode else "",
        response_length=len(tokens) - start,
        label=None if label is None else str(label),
        reward=episode.reward,
        loss_mask=sequence.loss_mask_T[start:].astype(int).tolist(),
        rollout_log_probs=sequence.logprobs_T[start:].tolist(),
        weight_versions=[str(version) for version in sorted(versions - {-1})],
        status=_status(sequence, episode.records[int(sequence.calls_T[-1])]) if episode.records else Status.COMPLETED,
        metadata=place.metadata,
    )


def _status(sequence: TokenSequence, last: CallRecord) -> Status:
    """Return `TRUNCATED` if the choice that ends the sequence was cut off by a length limit, otherwise `COMPLETED`."""
    for choice in last.choices:
        tokens = choice.token_ids()
        if choice.finish == FinishReason.LENGTH and sequence.tokens_T[-len(tokens) :].tolist() == tokens:
            return Status.TRUNCATED
    return Status.COMPLETED


def text_of(tokenizer: bytes) -> Decode:
    """Return a function that decodes with a `tokenizer.json` and keeps special tokens.

    Raises `ValueError` if the file cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_str(tokenizer.decode())
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"this tokenizer cannot be read: {error}") from error
    return lambda tokens: str(loaded.decode(list(tokens), skip_special_tokens=False))
