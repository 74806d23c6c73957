"""The calls of an episode in readable form: turns that extend each other, and every token that was sampled."""

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import msgspec

from bombus.bus import BlobMissing
from bombus.cli import NotInstalled
from bombus.config.algorithms import Overlong
from bombus.config.job import RunConfig
from bombus.datums.differences import KEPT, StepDifferences, differences_of_calls, object_name
from bombus.datums.reading import ancestors
from bombus.errors import EngineFault, LogCorrupted
from bombus.hive.decoding import decoded
from bombus.hive.events import EpisodeType
from bombus.hive.records import CallRecord, CallRef, CallStatus, Choice, SamplingParams, unpack_logprobs, unpack_tokens
from bombus.replay import providers
from bombus.replay.episode.story import EpisodeStory
from bombus.replay.providers import TokenText
from bombus.replay.source import Source

_step_differences = msgspec.msgpack.Decoder(StepDifferences)
_files = msgspec.msgpack.Decoder(dict[str, bytes])


class Token(msgspec.Struct, frozen=True):
    """A sampled token. `logprob` is the one that the sampler reported. `trained` says that the loss has a term for the
    token once its episode is in a batch. `difference` is the trainer's logprob before the step minus the sampler's."""

    id: int
    text: str
    logprob: float
    version: int
    trained: bool
    difference: float | None = None


class TurnReply(msgspec.Struct, frozen=True, kw_only=True):
    tokens: tuple[Token, ...]
    finish: str
    message: dict[str, Any] | None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One call. `parent` is the number of the turn that it extends, or 0 if it starts a branch.

    `messages` and `prompt` contain only what the call added to its parent's. `tools`, and the `variables` that the
    request passed to the chat template, apply to a whole branch: only the turn that starts the branch has them.
    `auxiliary_call` is the purpose of a call that the harness made for itself, and empty for a call of the task.
    `advantage` is None if it is not known. `seen` is the whole prompt with special tokens marked, in two parts: the
    parent's prompt and reply, and what the call added.
    """

    number: int
    call: str
    parent: int
    parent_reply: int
    role: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    variables: dict[str, bool | int | float | str]
    prompt: str
    prompt_tokens: int
    prompt_added: int
    replies: tuple[TurnReply, ...]
    sampling: SamplingParams
    began_s: float  # after the episode was claimed
    seconds: float
    untrained: str  # why the call is not trained on, or "" if it is
    advantage: float | None
    seen: tuple[str, str] = ("", "")
    auxiliary_call: str = ""
    overridden: tuple[str, ...] = ()  # parts of the client's request that were overridden or left out

    @property
    def is_aside(self) -> bool:
        """Return whether the turn is an auxiliary call that is not trained on, and so not a branch of its episode."""
        return bool(self.auxiliary_call and self.untrained)


class EpisodeTranscript(msgspec.Struct, frozen=True, kw_only=True):
    """An episode with its turns.

    `lost` names the calls that cannot be read. `notes` say what else is not shown, and what the user can do about it.
    `no_differences` says why no token has a `difference`.
    """

    story: EpisodeStory
    turns: tuple[Turn, ...]
    lost: tuple[str, ...]
    notes: tuple[str, ...]
    no_differences: str = ""

    def branches(self) -> list[tuple[int, ...]]:
        """Return a path for each turn that no other turn extends: the numbers of the turns that lead to it, then its
        own.

        Auxiliary calls that are not trained on are included only if another turn extends them.
        """
        parents = {turn.number: turn.parent for turn in self.turns}
        counted = [turn.number for turn in self.turns if not turn.is_aside]
        extended: set[int] = set()
        for number in counted:
            before = parents[number]
            while before and before not in extended:
                extended.add(before)
                before = parents.get(before, 0)
        found: list[tuple[int, ...]] = []
        for leaf in sorted(set(counted) - extended):
            branch = [leaf]
            while parents.get(branch[-1], 0):
                branch.append(parents[branch[-1]])
            found.append(tuple(reversed(branch)))
        return found


async def read_transcript(source: Source, story: EpisodeStory, prompts: bool = False) -> EpisodeTranscript:
    """Read and decode the calls of an episode. Calls that no longer exist are named in `lost`.

    With `prompts`, each turn has its whole prompt (`seen`), which repeats the prompts before it.
    """
    notes: list[str] = []
    lost: list[str] = []
    records: dict[CallRef, CallRecord] = {}
    for ref in story.calls:
        try:
            records[ref] = (await source.records([ref]))[0]
        except LogCorrupted as error:
            lost.append(str(error))
    job = None if story.config is None else RunConfig.from_json(story.config.config)
    differences, unknown = await _differences(source, story, job)
    decoder = _TurnDecoder(story, job, records, await _token_text(source, story, notes), differences)
    advantages = await _advantages(source, story, job, notes)
    turns = tuple(decoder.turn(ref, advantages.get(ref)) for ref in records)
    if prompts:
        turns = tuple(msgspec.structs.replace(turn, seen=decoder.seen(ref)) for turn, ref in zip(turns, records))
    return EpisodeTranscript(
        story=story,
        turns=turns,
        lost=tuple(lost),
        notes=tuple(notes),
        no_differences="" if differences else unknown,
    )


async def _token_text(source: Source, story: EpisodeStory, notes: list[str]) -> TokenText:
    try:
        files = decoded(_files.decode, await source.blob(story.tokenizer))
        return providers.token_texts()(files)
    except (NotInstalled, BlobMissing, EngineFault, msgspec.MsgspecError) as error:
        notes.append(f"tokens are shown as their ids: {error}")
        return IdsAsText()


class IdsAsText:
    """Shows tokens as their ids. Used if there is no tokenizer."""

    def __call__(self, token: int) -> str:
        return f"<{token}>"

    def marked_up(self, tokens: Sequence[int]) -> str:
        return "".join(map(self, tokens))


async def _advantages(
    source: Source, story: EpisodeStory, job: RunConfig | None, notes: list[str]
) -> dict[CallRef, float]:
    """Return the advantage of each call, as the trainer computes it from the group.

    An episode that cannot be read is left out of its group here, just as it is in the trainer.
    """
    if story.group is None or job is None:
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
        found = providers.call_advantages()(members, job)
    except (NotInstalled, EngineFault, ValueError) as error:
        notes.append(f"no advantages: {error}")
        return {}
    mine = (values for (member, _), values in zip(members, found, strict=True) if member.episode == story.id)
    refs = next(member.calls for member in story.group.episodes if member.episode == story.id)
    return dict(zip(refs, next(mine, ())))


async def _differences(
    source: Source, story: EpisodeStory, job: RunConfig | None
) -> tuple[dict[tuple[str, int], dict[int, float]], str]:
    """Return `differences_of_calls` of an episode, or why they are not known."""
    if story.group is None or job is None:
        return {}, "no step has trained on this episode"
    try:
        found = decoded(_step_differences.decode, await source.blob(object_name(story.engine, story.step)))
        if (found.run, found.step) != (story.run, story.step):
            return {}, f"kept for the newest {KEPT} steps"
        if story.id not in found.episodes:
            return {}, f"step {story.step} left this episode out"
        refs = next(member.calls for member in story.group.episodes if member.episode == story.id)
        records = await source.records(refs)
        context = [*await ancestors(source, records)]
        if not _trains_auxiliary_calls(job):
            context += [record for record in records if record.auxiliary_call]
            records = [record for record in records if not record.auxiliary_call]
        return differences_of_calls(found.episodes[story.id], records, context), "its group has no signal"
    except BlobMissing:
        return {}, f"those of step {story.step} are not stored"
    except (LogCorrupted, msgspec.MsgspecError) as error:
        return {}, str(error)


class _TurnDecoder:
    """Decodes the records of an episode's calls into turns."""

    def __init__(
        self,
        story: EpisodeStory,
        job: RunConfig | None,
        records: Mapping[CallRef, CallRecord],
        token_text: TokenText,
        differences: Mapping[tuple[str, int], Mapping[int, float]],
    ) -> None:
        self._story = story
        self._records = records
        self._token_text = token_text
        self._differences = differences
        self._numbers = {ref.id: number for number, ref in enumerate(records, 1)}
        self._job = job
        self._masked = _is_masked(story, records, job)

    def turn(self, ref: CallRef, advantage: float | None) -> Turn:
        record = self._records[ref]
        parent = record.parent
        timings = record.timings
        tail = unpack_tokens(record.prompt_tail)
        untrained = self._why_untrained(ref, record)
        from_nothing = record.prompt_tokens == 0
        return Turn(
            number=self._numbers[ref.id],
            call=record.id,
            parent=self._numbers.get(parent.id, 0) if parent is not None else 0,
            parent_reply=record.parent_choice,
            role=record.role,
            messages=record.messages,
            tools=record.tools,
            variables=record.chat_template_kwargs,
            prompt="".join(map(self._token_text, tail)),
            prompt_tokens=record.prompt_tokens,
            prompt_added=len(tail),
            replies=tuple(
                self._reply(choice, not untrained, from_nothing, self._differences.get((record.id, number), {}))
                for number, choice in enumerate(record.choices)
            ),
            sampling=record.sampling,
            began_s=max(0, timings.received_ns - self._story.claimed_ns) / 1e9,
            seconds=max(0, timings.finished_ns - timings.received_ns) / 1e9,
            untrained=untrained,
            advantage=None if untrained else advantage,
            auxiliary_call=record.auxiliary_call,
            overridden=record.overridden,
        )

    def seen(self, ref: CallRef) -> tuple[str, str]:
        """Return a call's prompt as the model saw it: the part before the call, and the part that it added."""
        record = self._records[ref]
        added = self._token_text.marked_up(unpack_tokens(record.prompt_tail))
        before: list[int] = []
        while record.parent is not None:
            parent = self._records.get(record.parent)
            if parent is None:
                return f"(lost with call {record.parent.id}){self._token_text.marked_up(before)}", added
            before = [*unpack_tokens(parent.prompt_tail), *parent.choices[record.parent_choice].token_ids(), *before]
            record = parent
        return self._token_text.marked_up(before), added

    def _why_untrained(self, ref: CallRef, record: CallRecord) -> str:
        """Return why the loss has no terms for a call, or "" if it has some or will have some."""
        story = self._story
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
        if record.constrained:
            return f"forced into a format ({', '.join(record.constrained)}), so it was not drawn from the policy alone"
        if record.auxiliary_call and not _trains_auxiliary_calls(self._job):
            return f"an auxiliary call of its harness ({record.auxiliary_call}), which the job does not train on"
        if self._masked:
            return "a call of its episode was cut at the job's limit, and the job masks such episodes"
        return ""

    def _reply(self, choice: Choice, trained: bool, from_nothing: bool, differences: Mapping[int, float]) -> TurnReply:
        ids, logprobs = choice.token_ids(), unpack_logprobs(choice.logprobs)
        versions = [-1] * len(ids)
        for span in choice.spans:
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        tokens = tuple(
            # The first token after an empty prompt has no context from which it could be predicted.
            Token(
                token,
                self._token_text(token),
                logprob,
                version,
                trained and not (from_nothing and index == 0),
                differences.get(index),
            )
            for index, (token, logprob, version) in enumerate(zip(ids, logprobs, versions))
        )
        return TurnReply(tokens=tokens, finish=str(choice.finish), message=choice.message)


def _trains_auxiliary_calls(job: RunConfig | None) -> bool:
    return job is not None and job.rollout.trains_auxiliary_calls


def _is_masked(story: EpisodeStory, records: Mapping[CallRef, CallRecord], job: RunConfig | None) -> bool:
    """Return whether the job masks this episode because one of its calls was cut off at a limit of the job."""
    if job is None:
        return False
    match job.trainer.overlong:
        case Overlong.MASK:
            limits = job.rollout.max_response_length_in_one_turn, job.rollout.max_model_len
            trained = [
                record
                for ref, record in records.items()
                if story.belongs(ref) and (job.rollout.trains_auxiliary_calls or not record.auxiliary_call)
            ]
            return any(record.was_cut(*limits) for record in trained)
        case Overlong.KEEP | Overlong.PENALTY:
            return False
        case _:
            assert_never(job.trainer.overlong)
