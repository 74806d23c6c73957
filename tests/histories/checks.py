"""What must hold of a history, worked out from what the model sampled and what its harness did. Pure.

Nothing here is taken from the gateway but the records that are judged, and from the trainer but its sequences.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bombus.hive.records import CallRecord, CallStatus, unpack_logprobs, unpack_tokens
from bombus_trainer.data.batch import EpisodeCalls
from bombus_trainer.data.sequences import TokenSequence, merge_calls
from tests.histories.answers import STOP
from tests.histories.engine import Generation
from tests.histories.entries import Entry, Said, Visible, words_of
from tests.histories.model import END, START, text_of, written
from tests.histories.truth import Asked, Place, Tip, Truth


@dataclass(frozen=True)
class Evidence:
    """A history that is over: what its harness asked, what was sampled, and what the log has of it."""

    truth: Truth
    generations: Mapping[str, Generation]
    records: Sequence[CallRecord]
    rewrites: int
    roams: bool
    joins_users: bool  # the dialect takes messages of the user that follow each other as one

    @property
    def asked(self) -> Sequence[Asked]:
        return self.truth.asked


def problems(evidence: Evidence) -> Iterator[str]:
    """Yield what is wrong with a history. What comes of the records is only judged where these are right."""
    wrong = [*_wrong_records(evidence)]
    if wrong:
        yield from wrong
        return
    episode = EpisodeCalls("e", 1.0, tuple(evidence.records)).without_auxiliary_calls()
    sequences = merge_calls("e", episode.records, episode.context).sequences
    yield from _wrong_tokens(evidence, sequences)
    yield from _wrong_prompts(evidence)
    yield from _wrong_retries(evidence)
    yield from _wrong_parents(evidence)
    yield from _lost_bridges(evidence)
    yield from _wrong_twins(evidence)
    most = 1 + evidence.rewrites + len(_taken_by_others(evidence))
    if evidence.roams:  # see `_allowed`
        most += sum(len(group) - 1 for group in _groups(evidence).values())
    if len(sequences) > most:
        yield f"{len(sequences)} sequences, and the moves explain {most}"


# ---- each call is recorded as it was sampled -----------------------------------------------------------------------


def _wrong_records(evidence: Evidence) -> Iterator[str]:
    """Each generation has one record with its tokens and logprobs; an auxiliary call is told; answers say what was
    meant."""
    counted = Counter(record.id for record in evidence.records)
    if counted != Counter([*evidence.generations]):
        yield f"{len(evidence.generations)} calls were sampled, and these recorded: {counted}"
        return
    sides = {asked.call: asked.auxiliary_call for asked in evidence.asked if asked.call}
    for record in evidence.records:
        generation = evidence.generations[record.id]
        (choice,) = record.choices
        if record.auxiliary_call != sides.get(record.id, record.auxiliary_call):
            yield f"call {record.id} is recorded as auxiliary call {record.auxiliary_call!r}, not {sides[record.id]!r}"
        tokens, logprobs = unpack_tokens(choice.tokens), unpack_logprobs(choice.logprobs)
        wanted = len(tokens) if record.status == CallStatus.CUT_OFF else _used(generation)
        if tuple(tokens) != generation.tokens[:wanted] or len(tokens) != wanted:
            yield f"call {record.id} is recorded with {len(tokens)} other tokens than the {wanted} that were sampled"
        if tuple(logprobs) != generation.logprobs[:wanted]:
            yield f"call {record.id} is recorded with other logprobs than those of its tokens"
    for asked in evidence.asked:
        if asked.said is not None:
            yield from _misread(asked, evidence.generations[asked.call])


def _used(generation: Generation) -> int:
    """Return how many tokens of an answer count: a stop string ends it with the token that completes the string."""
    count = len(generation.tokens)
    if not generation.plan.after_stop:
        return count
    return next((n for n in range(count) if STOP in text_of(generation.tokens[:n])), count)


def _misread(asked: Asked, generation: Generation) -> Iterator[str]:
    """Yield where an answer, as its client got it, is not what the model meant."""
    said, plan = asked.said, generation.plan
    assert said is not None
    if generation.finish == "length":
        return
    if [(call.name, json.loads(call.arguments)) for call in said.calls] != [(c.name, c.arguments) for c in plan.calls]:
        yield f"call {said.call} was answered with the calls {said.calls}, and {plan.calls} were meant"
    if said.text.split() != f"{plan.text}{plan.broken}".split():
        yield f"call {said.call} was answered with {said.text!r}, and {plan.text!r} was meant"
    if said.reasoning.split() != plan.reasoning.split():
        yield f"call {said.call} was answered with reasoning {said.reasoning!r}, and {plan.reasoning!r} was meant"


# ---- each token is trained once, after what was before it ----------------------------------------------------------


def _wrong_tokens(evidence: Evidence, sequences: Sequence[TokenSequence]) -> Iterator[str]:
    """Each sampled token is trained once, with its logprob, unless it belongs to an auxiliary call or was cut off.

    Each logprob is that of one token alone, so it says where the token is.
    """
    owner = {
        logprob: (call, number)
        for call, generation in evidence.generations.items()
        for number, logprob in enumerate(generation.logprobs)
    }
    trained: Counter[tuple[str, int]] = Counter()
    for sequence in sequences:
        tokens, logprobs = sequence.tokens_T.tolist(), sequence.logprobs_T.tolist()
        checked: set[str] = set()
        for place in sequence.loss_mask_T.nonzero()[0].tolist():
            call, number = owner[logprobs[place]]
            generation = evidence.generations[call]
            trained[call, number] += 1
            if tokens[place] != generation.tokens[number]:
                yield f"token {number} of call {call} is trained as another token"
            if call not in checked and tuple(tokens[: place - number]) != generation.prompt:
                yield f"the answer of call {call} is trained after another prompt than it was sampled for"
            checked.add(call)
    wanted = {
        (record.id, number)
        for record in evidence.records
        if not record.auxiliary_call and record.status == CallStatus.COMPLETE
        for number in range(record.completion_tokens())
    }
    twice = [token for token, count in trained.items() if count > 1]
    missing, other = wanted - set(trained), set(trained) - wanted
    if twice or missing or other:
        yield f"{len(missing)} tokens are not trained, {len(twice)} more than once, {len(other)} against the rules"


def _wrong_prompts(evidence: Evidence) -> Iterator[str]:
    """A prompt is that of the call that it continues, its answer, and what its harness has said since, to the letter.

    Without such a call it ends with what its harness has said. Answers that stand elsewhere are not looked into.
    """
    records = {record.id: record for record in evidence.records}
    for asked in evidence.asked:
        since = asked.entries[asked.tip.count if asked.tip is not None else 0 :]
        if asked.said is None or any(entry.said is not None for entry in since):
            continue
        parent = records[asked.call].parent
        before = b""
        if parent is not None:
            tokens = [*evidence.generations[parent.id].prompt, *unpack_tokens(records[parent.id].choices[0].tokens)]
            before = written(tokens if tokens[-1] == END else [*tokens, END]) + b"\n"
        turns = before + _turns(since, evidence.joins_users)
        prompt = written(evidence.generations[asked.call].prompt)
        if not prompt.endswith(turns) or (before and prompt != turns):
            yield f"the prompt of call {asked.call} is not what its harness has said: {prompt[-200:]!r}"


def _turns(entries: Sequence[Entry], joins_users: bool) -> bytes:
    """Return what the template writes for entries without answers, and the beginning of the next answer."""
    turns: list[tuple[str, str]] = []
    for entry in entries:
        if entry.kind == "results":
            turns += [("tool", f"<tool_response>\n{text}\n</tool_response>") for _, text in entry.results]
        elif joins_users and turns and turns[-1][0] == entry.kind == "user":
            turns[-1] = ("user", f"{turns[-1][1]}\n{entry.text}")
        else:
            turns.append((entry.kind, entry.text))
    roles = {"tool": "user", "own": "assistant"}
    start, end = written([START]).decode(), written([END]).decode()
    texts = [f"{start}{roles.get(kind, kind)}\n{text}{end}\n" for kind, text in turns]
    return "".join([*texts, f"{start}assistant\n"]).encode()


def _wrong_retries(evidence: Evidence) -> Iterator[str]:
    """A retry with a mark is answered with the answer to one of the requests that had the same bytes."""
    for asked, said in evidence.truth.retried:
        same = [_of(each.said) for each in evidence.asked if each.body == asked.body and each.said is not None]
        if _of(said) not in same:
            yield f"a marked retry of {asked.call} was answered {said}"


def _of(said: Said) -> tuple[str, Visible, str]:
    return said.call, said.visible, said.reasoning


# ---- what is one conversation is one sequence ----------------------------------------------------------------------


Group = tuple[Place, Visible]


def _group(place: Place, visible: Visible) -> Group:
    """Return what answers have in common of which none is told from the others by its words."""
    return place, words_of(visible)


def _groups(evidence: Evidence) -> dict[Group, list[Asked]]:
    """Return the answered requests, grouped by their place and by what their answers say."""
    complete = {record.id for record in evidence.records if record.status == CallStatus.COMPLETE}
    found: dict[Group, list[Asked]] = {}
    for asked in evidence.asked:
        if asked.said is not None and asked.call in complete:
            found.setdefault(_group(asked.place, asked.said.visible), []).append(asked)
    return found


def _wrong_parents(evidence: Evidence) -> Iterator[str]:
    """Each call continues the last answer that stands where it was sampled, or another that says the same there."""
    records = {record.id: record for record in evidence.records}
    groups = _groups(evidence)
    unseen = {record.id for record in evidence.records} - {asked.call for asked in evidence.asked}
    for asked in evidence.asked:
        if asked.said is None:
            continue
        parent = records[asked.call].parent
        found = parent.id if parent is not None else ""
        allowed = _allowed(asked.tip, groups, evidence.roams) if asked.tip is not None else {""}
        may_be_unseen = asked.tip is not None and (evidence.roams or not asked.tip.named)
        if found not in allowed and not (found in unseen and may_be_unseen):
            yield f"call {asked.call} continues {found or 'nothing'}, and not {' or '.join(allowed) or 'nothing'}"


def _allowed(tip: Tip, groups: Mapping[Group, Sequence[Asked]], roams: bool) -> set[str]:
    """Return the calls that a request with this tip may continue.

    A gateway that knows one of several answers that say the same does not look for those of other gateways (`roams`).
    """
    if tip.named and not roams:
        return {tip.said.call}
    same = [asked.said for asked in groups[_group(tip.place, tip.said.visible)] if asked.said is not None]
    return {said.call for said in same if roams or not tip.reasoned or said.reasoning == tip.said.reasoning}


def _lost_bridges(evidence: Evidence) -> Iterator[str]:
    """A prompt whose text begins with that of an earlier prompt and its whole answer continues that call."""
    generations, paths = evidence.generations, dict[str, bytes]()
    began = {asked.call: asked.began for asked in evidence.asked if asked.call}
    ended = {asked.call: asked.ended for asked in evidence.asked if asked.call}
    for record in evidence.records:
        generation = generations[record.id]
        is_whole = generation.tokens[-1:] == (END,) and not generation.plan.after_stop
        if is_whole and record.status == CallStatus.COMPLETE:
            paths[record.id] = written(generation.prompt) + written(generation.tokens)
    for record in evidence.records:
        prompt, kept = generations[record.id].prompt, 0
        if record.parent is not None:
            parent = generations[record.parent.id]
            kept = len(parent.prompt) + len(parent.tokens)
        text, reached = written(prompt), len(written(prompt[:kept]))
        for call, path in paths.items():
            if ended.get(call, math.inf) < began.get(record.id, 0) and len(path) > reached and text.startswith(path):
                yield f"call {record.id} does not continue {call}, whose text its prompt begins with"


def _taken_by_others(evidence: Evidence) -> set[str]:
    """Return the answers that a line with an equal one went on with before their own line did.

    Nothing told the two apart in what the first of these lines wrote back, and what the second one wrote back tells
    them apart. So both go on with one answer, which is a branch that no move explains.
    """
    parents = {record.id: record.parent.id for record in evidence.records if record.parent is not None}
    found = [(parents.get(asked.call), asked.tip, asked) for asked in evidence.asked if not asked.auxiliary_call]
    since: dict[str, int] = {}  # when the first request of an answer's own line was answered
    for parent, tip, asked in found:
        if parent is not None and tip is not None and tip.is_told and tip.said.call == parent:
            since[parent] = min(asked.ended, since.get(parent, asked.ended))
    return {
        parent
        for parent, tip, asked in found
        if parent is not None and tip is not None and tip.said.call != parent and asked.began < since.get(parent, 0)
    }


def _wrong_twins(evidence: Evidence) -> Iterator[str]:
    """Lines that cannot be told apart each continue an answer of their own, as long as there is one."""
    if evidence.roams:  # a gateway does not know what another one has continued meanwhile
        return
    parents = {record.id: record.parent.id for record in evidence.records if record.parent is not None}
    unseen = {record.id for record in evidence.records} - {asked.call for asked in evidence.asked}
    continued: dict[Group, list[Asked]] = {}
    for asked in evidence.asked:
        tip = asked.tip
        if asked.said is not None and tip is not None and not (tip.is_told or tip.said.calls):
            continued.setdefault(_group(tip.place, tip.said.visible), []).append(asked)
    groups = _groups(evidence)
    for group, lines in continued.items():
        twins = groups[group]
        texts = {twin.said.text for twin in twins if twin.said is not None}
        if len(texts) > 1 or max(twin.ended for twin in twins) > min(line.began for line in lines):
            continue
        # Clients that have hung up count: their calls continue answers, and what they did not hear is one to continue.
        known = {twin.call for twin in twins} & set(parents.values())
        known |= {parents.get(line.call, "") for line in lines} & unseen
        heard = {line.tip.said.call for line in lines if line.tip is not None}  # some dialects name the answer
        if len(known) < min(len(twins), len(heard)):
            yield f"{len(lines)} calls continue {len(known)} of {len(twins)} answers that say the same"
