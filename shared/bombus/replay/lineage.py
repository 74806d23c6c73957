"""`bombus replay lineage`: traces a version of the weights back to its batches and to the episodes in them."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing

import msgspec

from bombus.figures import byte_size, one_line
from bombus.hive import events as ev
from bombus.replay.logged_run import LoggedRun, read_run
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import run_on_source
from bombus.replay.source import Source
from bombus.terminal import say, say_json

STEPS_SHOWN = 10
GROUPS_SHOWN = 32


class Member(msgspec.Struct, kw_only=True):
    """An episode of a batch. Its tokens were sampled by `versions`, oldest to newest; -1 means unknown.

    If it ended before the base of a compacted log, only what the batch says about it is known.
    """

    episode: str
    client: str = ""
    reward: float
    calls: int
    tokens: int = 0
    versions: tuple[int, int] = (-1, -1)


class LineageGroup(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    episodes: tuple[Member, ...]


class Step(msgspec.Struct, kw_only=True):
    """An optimizer step and the version that it produced. Fields for events that have not happened yet are empty."""

    step: int
    batch_event: int
    groups: tuple[LineageGroup, ...]
    config_digest: str
    checkpoint: str = ""
    checkpoint_digest: str = ""
    trainer_epoch: int = 0
    weights: ev.Weights | None = None

    @property
    def members(self) -> list[Member]:
        return [member for group in self.groups for member in group.episodes]


class Lineage(msgspec.Struct, kw_only=True):
    """The ancestry of a version: the `steps` that led to it, newest last, and the name of the `model` that is version
    0."""

    engine: str
    run: int
    model: str
    steps: list[Step]


async def trace(source: Source, step: int, engine: str | None = None, run: int | None = None) -> Lineage:
    """Return the ancestry of a version of a run: by default, of the newest run of the only engine. Raises `NotOnLog` if
    the run does not have it."""
    logged = await read_run(source, engine, run)
    until = logged.step(step).seq
    numbers = [number for number in sorted(logged.steps) if number <= step]
    steps = [_step(logged, number) for number in numbers]
    members = {member.episode: member for each in steps for member in each.members}
    groups = [group for number in numbers for group in logged.steps[number].batch.groups]
    calls = {ref: each.episode for group in groups for each in group.episodes for ref in each.calls}

    def note(found: Iterable[ev.NotedCall]) -> None:
        for call in found:
            if call.ref in calls:
                member = members[calls[call.ref]]
                known = [version for version in member.versions if version >= 0]
                member.versions = min([call.oldest, *known]), max([call.newest, *known])

    hive, _ = await source.base()
    for state in hive.engines.values():
        note(call for episode in state.open.values() for call in episode.calls)
    async with aclosing(source.events(0, until)) as entries:
        async for entry in entries:
            if isinstance(entry.event, ev.CallsNoted):
                note(entry.event.calls)
            elif isinstance(entry.event, ev.EpisodeEnded):
                for outcome in entry.event.outcomes:
                    if (ended := members.get(outcome.episode)) is not None:
                        ended.client, ended.tokens = entry.event.client, outcome.completion_tokens
    return Lineage(engine=logged.engine, run=logged.run, model=logged.job.model.path, steps=steps)


def _step(logged: LoggedRun, number: int) -> Step:
    sealed, ready = logged.steps[number], logged.versions.get(number)
    found = Step(
        step=number,
        batch_event=sealed.seq,
        groups=tuple(
            LineageGroup(task=group.task, episodes=tuple(map(_member, group.episodes))) for group in sealed.batch.groups
        ),
        config_digest=sealed.batch.config_digest,
        weights=None if ready is None else ready.weights,
    )
    if (done := sealed.done) is not None:
        found.checkpoint, found.checkpoint_digest = done.checkpoint, done.checkpoint_digest
        found.trainer_epoch = done.trainer_epoch
    return found


def _member(member: ev.BatchEpisode) -> Member:
    return Member(episode=member.episode, reward=member.reward, calls=len(member.calls))


# ---- the command --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument(
        "step", type=int, metavar="STEP", help="the optimizer step that made the version with the same number"
    )
    parser.add_argument("--engine", metavar="NAME", help="required when the hive has several engines")
    parser.add_argument("--run", type=int, metavar="R", help="which run of the engine (default: the newest)")
    parser.add_argument("--episodes", action="store_true", help="list every episode of the step")
    parser.add_argument(
        "--json", action="store_true", help="print all steps up to this one as JSON, with all that is known about them"
    )


def run(arguments: argparse.Namespace) -> int:
    return run_on_source("bombus replay lineage", _show, arguments)


async def _show(source: Source, arguments: argparse.Namespace) -> None:
    lineage = await trace(source, arguments.step, arguments.engine, arguments.run)
    if arguments.json:
        say_json(msgspec.to_builtins(lineage))
    else:
        say(*as_text(lineage, arguments.episodes))


def as_text(lineage: Lineage, episodes: bool) -> Iterator[str]:
    """Yield lines of text. With `episodes`, include every episode of the last step."""
    *before, last = lineage.steps
    yield f"policy version {last.step} of engine {lineage.engine}, run {lineage.run}"
    if last.weights is not None:
        yield f"  weights     {one_line(last.weights.where)}, {byte_size(last.weights.bytes)}"
        yield f"              sha256 {last.weights.sha256}"
    yield from _checkpoint_of(last)
    yield f"  job         configuration {last.config_digest}"
    yield f"  made of     version {last.step - 1}, and the batch of event {last.batch_event}: {_summary(last.members)}"
    yield ""
    yield f"  {'task':<24} episodes  reward             sampled on  tokens  clients"
    shown = last.groups if episodes else last.groups[:GROUPS_SHOWN]
    for group in shown:
        yield _row(one_line(group.task)[:24], group.episodes)
        for member in group.episodes if episodes else ():
            yield _row(f"  {member.episode}", (member,))
    if len(shown) < len(last.groups):
        yield f"  and {len(last.groups) - len(shown)} more: --episodes"
    if before:
        yield ""
        yield f"  {'before it':<24} episodes  reward             sampled on  tokens  checkpoint"
        for step in before[: -STEPS_SHOWN - 1 : -1]:
            yield f"{_row(f'step {step.step}', step.members, named=False)}  {step.checkpoint_digest[:12]}"
        if len(before) > STEPS_SHOWN:
            yield f"  and {len(before) - STEPS_SHOWN} more: --json"
    yield f"  version 0 was the model {one_line(lineage.model)}"


def _summary(members: Sequence[Member]) -> str:
    clients = len({member.client for member in members})
    mean = sum(member.reward for member in members) / max(len(members), 1)
    return f"{len(members)} episodes of {clients} client{'s' * (clients != 1)}, mean reward {mean:.3f}"


def _checkpoint_of(step: Step) -> Iterator[str]:
    if step.checkpoint:
        yield f"  checkpoint  {one_line(step.checkpoint)}, by trainer epoch {step.trainer_epoch}"
        yield f"              digest {step.checkpoint_digest}"
    elif step.trainer_epoch:
        yield f"  checkpoint  none of this step (trainer.checkpoint_every), made by trainer epoch {step.trainer_epoch}"
    else:
        yield "  checkpoint  none: the step was not completed in this log"


def _row(name: str, members: Sequence[Member], named: bool = True) -> str:
    rewards = [member.reward for member in members]
    mean = sum(rewards) / max(len(rewards), 1)
    spread = f" ({min(rewards):.2f} to {max(rewards):.2f})" if len(rewards) > 1 else ""
    oldest = min((member.versions[0] for member in members), default=-1)
    newest = max((member.versions[1] for member in members), default=-1)
    versions = "-" if newest < 0 else str(newest) if oldest == newest else f"{oldest} to {newest}"
    tokens = sum(member.tokens for member in members)
    row = f"  {name:<24} {len(members):>8}  {f'{mean:.3f}{spread}':<22} {versions:>6}  {tokens:>6}"
    return row + "  " + one_line(", ".join(sorted({member.client[:12] for member in members}))) if named else row
