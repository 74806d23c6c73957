"""Reads the tables whose rows are in stored calls: answers, tokens and samples."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from bombus.cli import REPLAY, load
from bombus.datums.call_sequences import is_learnt, learnt_tokens
from bombus.errors import LogCorrupted
from bombus.figures import counted, seconds_between
from bombus.hive.records import CallRecord, CallRef, Choice, decode_record, unpack_logprobs
from bombus.insight.tables import SCHEMAS, TableRow, Write, batch_of
from bombus.replay.logged_run import read_run
from bombus.replay.source import RECORDS_AT_ONCE, Source
from bombus.terminal import complain


class StoredCall(NamedTuple):
    """A call whose record is read.

    `learnt` says that the call is complete and not auxiliary. `done` says that a completed step had its episode in its
    batch, and `trained` how many tokens of the episode that step trained on, or None if it did not report that.
    """

    run: str
    episode: str
    ref: CallRef
    learnt: bool
    done: bool
    trained: int | None


async def read_stored_calls(source: Source, episodes: Iterable[Sequence[StoredCall]], write: Write) -> None:
    """Read `answers` and `tokens` of these episodes. Calls that are no longer kept are counted in a warning."""
    lost = 0
    for part in _parts(episodes):
        records = iter(await _records(source, [call.ref for calls in part for call in calls]))
        answers: list[TableRow] = []
        tokens: list[list[Any]] = [[] for _ in SCHEMAS["tokens"]]
        for calls in part:
            found = [next(records) for _ in calls]
            trained = _is_trained(calls, found)
            for call, record in zip(calls, found):
                if record is None:
                    continue
                for number, choice in enumerate(record.choices):
                    place = (call.run, call.episode, call.ref.id, number)
                    answers.append((*place, *_answer(record, choice)))
                    _add_tokens(tokens, place, record, choice, trained if call.learnt else False)
            lost += found.count(None)
        if answers:
            write("answers", batch_of("answers", zip(*answers)))
            write("tokens", batch_of("tokens", tokens))
    if lost:
        complain(
            f"{counted(lost, 'call')} can no longer be read from {source.title}: these tables lack what they sampled"
        )


def _parts(episodes: Iterable[Sequence[StoredCall]]) -> Iterator[list[Sequence[StoredCall]]]:
    part: list[Sequence[StoredCall]] = []
    for calls in episodes:
        part.append(calls)
        if sum(map(len, part)) >= RECORDS_AT_ONCE:
            yield part
            part = []
    if part:
        yield part


async def _records(source: Source, refs: Sequence[CallRef]) -> list[CallRecord | None]:
    """Return the records of these calls, with None for each that is lost or damaged."""
    found: list[CallRecord | None] = []
    for ref, body in zip(refs, await source.bodies(refs), strict=True):
        try:
            found.append(None if body is None else decode_record(body, ref))
        except LogCorrupted:
            found.append(None)
    return found


def _is_trained(calls: Sequence[StoredCall], records: Sequence[CallRecord | None]) -> bool | None:
    """Return whether a step trained on the tokens of an episode that can be learnt, or None if only on some of them,
    since the log does not say on which."""
    first = calls[0]
    if not first.done or first.trained == 0:
        return False
    known = [learnt_tokens(record) for call, record in zip(calls, records) if call.learnt and record is not None]
    return True if first.trained == sum(known) else None


def _answer(record: CallRecord, choice: Choice) -> TableRow:
    timings = record.timings
    return (
        len(choice.tokens) // 4,
        choice.reasoning_tokens,
        choice.finish,
        choice.limit or None,
        _content(choice),
        record.sampling.temperature,
        timings.received_ns or None,
        seconds_between(timings.received_ns, timings.first_token_ns) if timings.first_token_ns else None,
        seconds_between(timings.received_ns, timings.finished_ns),
        record.replica,
    )


def _content(choice: Choice) -> str | None:
    content = None if choice.message is None else choice.message.get("content")
    return content if content is None or isinstance(content, str) else msgspec.json.encode(content).decode()


def _add_tokens(
    columns: list[list[Any]], place: TableRow, record: CallRecord, choice: Choice, trained: bool | None
) -> None:
    ids = choice.token_ids()
    versions: list[int | None] = [None] * len(ids)
    for span in choice.spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    verdicts = [trained if is_learnt(record) else False] * len(ids)
    if ids and not record.prompt_tokens:
        verdicts[0] = False  # nothing comes before it that could predict it
    repeated = ([each] * len(ids) for each in place)
    logprobs = unpack_logprobs(choice.logprobs)
    for column, values in zip(columns, (*repeated, range(len(ids)), ids, logprobs, versions, verdicts), strict=True):
        column.extend(values)


async def read_samples(source: Source, run: str, steps: Collection[int] = ()) -> list[pa.RecordBatch]:
    """Return the samples of a run's steps (default: of all whose calls are kept), a batch for each step.

    Raises `NotInstalled` without the trainer, and `NotOnLog` if the run is not a job's or has no such step.
    """
    command = REPLAY["batch"]
    batch_samples = load(command.module, command.extra).batch_samples
    engine, _, number = run.rpartition("-")
    logged = await read_run(source, engine, int(number))
    found = []
    for step in steps or logged.steps:
        try:
            samples = await batch_samples(source, logged, step)
        except LogCorrupted as error:
            complain(f"step {step} of {run} is left out: {error}")
            continue
        found.append(batch_of("samples", zip(*(_sample(run, step, sample) for sample in samples))))
    return found


def _sample(run: str, step: int, sample: Any) -> TableRow:
    ours = sample.metadata["bombus"]
    place = (run, step, sample.index, sample.group_index, ours["task"], ours["episode"], ours["branch"])
    texts = (sample.reward, str(sample.status), sample.prompt, sample.response)
    lists = (sample.tokens, sample.loss_mask, sample.rollout_log_probs, ours.get("advantages"), ours["versions"])
    return (*place, *texts, *lists)
