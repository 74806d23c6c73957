"""`bombus replay lineage`: traces a version of the weights back to its batches and to the episodes in them."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import aclosing

import msgspec

from bombus.figures import byte_size, one_line
from bombus.hive import events as ev
from bombus.hive.events import Outcome
from bombus.hive.fold.episodes import ended_calls
from bombus.hive.fold.evolve import as_folded, evolve
from bombus.hive.state import Episode, Hive
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import run_on_source
from bombus.replay.source import Logged, NotOnLog, Source
from bombus.terminal import say, say_json

STEPS_SHOWN = 10
GROUPS_SHOWN = 32


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """An episode of a batch. Its tokens were sampled by `versions`, oldest to newest; -1 means unknown."""

    episode: str
    client: str
    reward: float
    calls: int
    tokens: int
    versions: tuple[int, int]


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


async def trace(source: Source, step: int, engine: str = "", run: int = 0) -> Lineage:
    """Return the ancestry of a version, in the newest run that has this version. Raises `NotOnLog` if no run has it."""
    hive, _ = await source.base()
    tracer = _Tracer(hive, engine, run, step)
    async with aclosing(source.events()) as entries:
        async for entry in entries:
            tracer.take(entry)
    return tracer.found()


class _Tracer:
    def __init__(self, hive: Hive, engine: str, run: int, step: int) -> None:
        self._hive = hive
        self._wanted = (engine, run)
        self._step = step
        self._runs: dict[tuple[str, int], Lineage] = {}
        self._ended: dict[str, Member] = {}  # episodes that have ended and are not in a batch yet

    def take(self, entry: Logged) -> None:
        event = entry.event
        if isinstance(event, ev.EpisodeEnded) and event.type == ev.EpisodeType.TRAIN:
            self._note_ended(event)
        evolve(self._hive, event)
        match event := as_folded(self._hive, event):
            case ev.EngineStarted():
                self._runs[event.engine, event.run] = self._new_run(event)
            case ev.BatchReady():
                self._run_of(event).steps.append(self._sealed(event, entry.seq))
            case ev.StepCompleted() | ev.WeightsReady():
                self._complete(event)
            case ev.GroupDropped() | ev.EpisodesTaken():
                for name in event.episodes:
                    self._ended.pop(name, None)
            case ev.PoolCleared():
                self._ended = {name: member for name, member in self._ended.items() if self._in_pool(name)}

    def _note_ended(self, event: ev.EpisodeEnded) -> None:
        """Record the episodes that end, before the fold forgets their calls."""
        engine = self._hive.engines.get(event.engine)
        if engine is None:
            return
        for outcome in event.outcomes:
            episode = engine.open.get(outcome.episode)
            self._ended[outcome.episode] = _member(outcome, event.client, episode)

    def _complete(self, event: ev.StepCompleted | ev.WeightsReady) -> None:
        match event:
            case ev.StepCompleted():
                for step in self._steps(event, event.step):
                    step.checkpoint, step.checkpoint_digest = event.checkpoint, event.checkpoint_digest
                    step.trainer_epoch = event.trainer_epoch
            case ev.WeightsReady():
                for step in self._steps(event, event.version):
                    step.weights = event.weights

    def _in_pool(self, episode: str) -> bool:
        return any(episode in engine.pool for engine in self._hive.engines.values())

    def _run_of(self, event: ev.BatchReady | ev.StepCompleted | ev.WeightsReady) -> Lineage:
        """Return the run of an event.

        A run that started before the base of a compacted log is added when it first appears.
        """
        return self._runs.setdefault((event.engine, event.run), self._new_run(event))

    def _new_run(self, event: ev.EngineStarted | ev.BatchReady | ev.StepCompleted | ev.WeightsReady) -> Lineage:
        active = self._hive.engines[event.engine].active
        return Lineage(engine=event.engine, run=event.run, model=active.model if active else "", steps=[])

    def _steps(self, event: ev.StepCompleted | ev.WeightsReady, number: int) -> list[Step]:
        """Return the step with this number as a list.

        The list is empty for version 0, and if the step's batch was sealed before the base of a compacted log.
        """
        return [step for step in self._run_of(event).steps[-1:] if step.step == number]

    def _sealed(self, event: ev.BatchReady, seq: int) -> Step:
        groups = tuple(
            LineageGroup(task=group.task, episodes=tuple(self._member_of(member) for member in group.episodes))
            for group in event.groups
        )
        return Step(step=event.step, batch_event=seq, groups=groups, config_digest=event.config_digest)

    def _member_of(self, member: ev.BatchEpisode) -> Member:
        """Return an episode of a batch.

        If it ended before the base of a compacted log, only what the batch says about it is known.
        """
        return self._ended.pop(member.episode, None) or Member(
            episode=member.episode,
            client="",
            reward=member.reward,
            calls=len(member.calls),
            tokens=0,
            versions=(-1, -1),
        )

    def found(self) -> Lineage:
        engine, run = self._wanted
        runs = [
            lineage
            for lineage in self._runs.values()
            if engine in ("", lineage.engine) and run in (0, lineage.run) and lineage.steps
        ]
        holding = [lineage for lineage in runs if any(step.step == self._step for step in lineage.steps)]
        if not holding:
            steps = ", ".join(
                f"engine {each.engine} run {each.run} has {each.steps[0].step} to {each.steps[-1].step}"
                for each in runs
            )
            raise NotOnLog(f"there is no step {self._step} in this log; {steps or 'no batch was sealed'}")
        newest = holding[-1]
        newest.steps = [step for step in newest.steps if step.step <= self._step]
        return newest


def _member(outcome: Outcome, client: str, episode: Episode | None) -> Member:
    refs = ended_calls(outcome, episode)
    mine = [call for call in episode.calls if call.ref in refs] if episode is not None else []
    return Member(
        episode=outcome.episode,
        client=client,
        reward=outcome.reward,
        calls=len(refs),
        tokens=outcome.completion_tokens,
        versions=(min((call.oldest for call in mine), default=-1), max((call.newest for call in mine), default=-1)),
    )


# ---- the command --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument(
        "step", type=int, metavar="STEP", help="the optimizer step that made the version with the same number"
    )
    parser.add_argument("--engine", default="", metavar="NAME", help="required when the hive has several engines")
    parser.add_argument(
        "--run", type=int, default=0, metavar="R", help="which run of the engine (default: the last that has this step)"
    )
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
