"""The calls of an episode as a person reads them: turns that extend each other, and every token that was sampled."""

from collections.abc import Mapping
from typing import Any

import msgspec

from bombus.bus import BlobMissing
from bombus.config.algorithms import Overlong
from bombus.config.job import RunConfig
from bombus.errors import EngineFault, LogCorrupted
from bombus.hive.events import EpisodeType
from bombus.hive.records import CallRecord, CallRef, CallStatus, Choice, SamplingParams, unpack_logprobs, unpack_tokens
from bombus.replay.borrowed import NotInstalled, Tokenizer, call_advantages, tokenizer
from bombus.replay.episode.story import Story
from bombus.replay.source import Source

_files = msgspec.msgpack.Decoder(dict[str, bytes])


class Token(msgspec.Struct, frozen=True):
    """`logprob` is the sampler's. `trained`: the loss has a term for it, when its episode is in a batch."""

    id: int
    text: str
    logprob: float
    version: int
    trained: bool


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    tokens: tuple[Token, ...]
    finish: str
    message: dict[str, Any] | None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One call. `parent` is the number of the turn that it extends, 0 when it began a line of its own.

    `messages` and `prompt` are what it added to its parent's; `advantage` is None where none is known.
    """

    number: int
    call: str
    parent: int
    parent_reply: int
    role: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    prompt: str
    prompt_tokens: int
    prompt_added: int
    replies: tuple[Reply, ...]
    sampling: SamplingParams
    seconds: float
    untrained: str  # why none of its tokens is trained, "" when they are
    advantage: float | None


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """`notes` say what could not be shown, and what to do about it."""

    story: Story
    turns: tuple[Turn, ...]
    lost: tuple[str, ...]
    notes: tuple[str, ...]

    def lines(self) -> list[tuple[int, ...]]:
        """The branches: for each turn that no other extends, the turns that lead to it."""
        parents = {turn.number: turn.parent for turn in self.turns}
        found: list[tuple[int, ...]] = []
        for leaf in sorted(parents.keys() - set(parents.values())):
            line = [leaf]
            while parents.get(line[-1], 0):
                line.append(parents[line[-1]])
            found.append(tuple(reversed(line)))
        return found


async def read_turns(source: Source, story: Story) -> Told:
    """The calls of a story, read and decoded. What is gone is named in `lost`."""
    notes: list[str] = []
    lost: list[str] = []
    records: dict[CallRef, CallRecord] = {}
    for ref in story.calls:
        try:
            records[ref] = (await source.records([ref]))[0]
        except LogCorrupted as error:
            lost.append(str(error))
    words = await _tokenizer(source, story, notes)
    advantages = await _advantages(source, story, notes)
    numbers = {ref.id: number for number, ref in enumerate(records, 1)}
    masked = _is_masked(story, records)
    turns = [
        _turn(_untrained(story, ref, record, masked), ref, record, numbers, words, advantages.get(ref))
        for ref, record in records.items()
    ]
    return Told(story=story, turns=tuple(turns), lost=tuple(lost), notes=tuple(notes))


async def _tokenizer(source: Source, story: Story, notes: list[str]) -> Tokenizer | None:
    try:
        return tokenizer(_files.decode(await source.blob(story.tokenizer)))
    except (NotInstalled, BlobMissing, EngineFault, msgspec.MsgspecError) as error:
        notes.append(f"tokens are shown by their ids: {error}")
        return None


async def _advantages(source: Source, story: Story, notes: list[str]) -> dict[CallRef, float]:
    """Of each call, as the trainer computes it from its group. An episode that cannot be read left its group there."""
    if story.group is None or story.config is None:
        return {}
    members = []
    for member in story.group.episodes:
        try:
            records = await source.records(member.calls)
        except LogCorrupted as error:
            notes.append(f"{member.episode} is left out of the group's advantages: {error}")
            continue
        members.append((member, records))
    try:
        found = call_advantages(members, RunConfig.from_json(story.config.config))
    except (NotInstalled, EngineFault, ValueError) as error:
        notes.append(f"no advantages: {error}")
        return {}
    mine = (values for (member, _), values in zip(members, found, strict=True) if member.episode == story.id)
    refs = next(member.calls for member in story.group.episodes if member.episode == story.id)
    return dict(zip(refs, next(mine, ())))


def _turn(
    untrained: str,
    ref: CallRef,
    record: CallRecord,
    numbers: Mapping[str, int],
    words: Tokenizer | None,
    advantage: float | None,
) -> Turn:
    parent = record.parent
    timings = record.timings
    tail = unpack_tokens(record.prompt_tail)
    return Turn(
        number=numbers[ref.id],
        call=record.id,
        parent=numbers.get(parent.id, 0) if parent is not None else 0,
        parent_reply=record.parent_choice,
        role=record.role,
        messages=record.messages,
        tools=record.tools,
        prompt="".join(text_of(token, words) for token in tail),
        prompt_tokens=record.prompt_tokens,
        prompt_added=len(tail),
        replies=tuple(_reply(choice, words, not untrained, record.prompt_tokens == 0) for choice in record.choices),
        sampling=record.sampling,
        seconds=max(0, timings.finished_ns - timings.received_ns) / 1e9,
        untrained=untrained,
        advantage=None if untrained else advantage,
    )


def _is_masked(story: Story, records: Mapping[CallRef, CallRecord]) -> bool:
    """Whether the job leaves out an episode like this one, of which a call was cut at a limit of the job."""
    job = None if story.config is None else RunConfig.from_json(story.config.config)
    if job is None or job.trainer.overlong != Overlong.MASK:
        return False
    limits = job.rollout.max_response_length_in_one_turn, job.rollout.max_model_len
    return any(record.was_cut(*limits) for ref, record in records.items() if story.belongs(ref))


def _untrained(story: Story, ref: CallRef, record: CallRecord, masked: bool) -> str:
    """Why the loss has no terms for a call; "" when it has, or will have."""
    if story.type == EpisodeType.EVAL:
        return "an evaluation episode"
    if story.aborted is not None:
        return "the episode was aborted"
    if record.status != CallStatus.COMPLETE:
        return "the client hung up"
    if story.calls[ref].late or not story.belongs(ref):
        return "it came after the episode's end"
    if record.sampling.temperature <= 0:
        return "sampled at temperature 0: there is no distribution to correct"
    return "a call of its episode was cut at the job's limit, and the job masks such episodes" if masked else ""


def _reply(choice: Choice, words: Tokenizer | None, trained: bool, from_nothing: bool) -> Reply:
    ids, logprobs = choice.token_ids(), unpack_logprobs(choice.logprobs)
    versions = [-1] * len(ids)
    for span in choice.spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    tokens = tuple(
        # Nothing comes before the first token of all, so nothing can predict it.
        Token(token, text_of(token, words), logprob, version, trained and not (from_nothing and index == 0))
        for index, (token, logprob, version) in enumerate(zip(ids, logprobs, versions))
    )
    return Reply(tokens=tokens, finish=str(choice.finish), message=choice.message)


def text_of(token: int, words: Tokenizer | None) -> str:
    """What a token adds to the text; bytes that are no whole character are spelled out, as `\\xe2`."""
    if words is None:
        return f"<{token}>"
    if token in words.specials:
        return words.specials[token]
    if not 0 <= token < len(words.pieces):
        return f"<{token}>"
    return words.pieces[token].decode("utf-8", "backslashreplace")
