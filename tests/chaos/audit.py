"""Compare the answers that clients got with the log, the trained steps and the weights."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bombus.bus import Bus, Reader
from bombus.bus.follow import read_event
from bombus.hive import events as ev
from bombus.hive.events import AnyEvent, NotedCall, Outcome
from bombus.hive.records import decode_record
from bombus.hive.state import Hive, evolve, with_calls
from bombus.replay import upkeep
from bombus.weights.deltas import file_sha256
from bombus_trainer.publish import checkpoint
from tests.chaos.ledger import Ledger


@dataclass
class Report:
    """The result of an audit. `wrong` is empty when every guarantee was kept."""

    calls_acknowledged: int = 0
    calls_found: int = 0
    episodes_ended: int = 0
    episodes_trained_once: int = 0
    episodes_waiting: int = 0  # in the pool or in the batch that is being trained
    episodes_dropped: int = 0  # with the reason in an event
    episodes_evaluated: int = 0
    steps: int = 0
    epochs: int = 0
    trained_again: bool = False  # the last step, from the log, with the same bytes
    lost: int = 0
    doubled: int = 0
    wrong: list[str] = field(default_factory=list)

    def lose(self, what: str) -> None:
        self.lost += 1
        self.wrong.append(f"lost: {what}")

    def double(self, what: str) -> None:
        self.doubled += 1
        self.wrong.append(f"doubled: {what}")


async def audit(bus: Bus, ledger: Ledger) -> Report:
    """Read the whole log and check it. The hive may run, but no agent may play."""
    report = Report()
    verified = await upkeep.verify(bus)
    report.epochs = verified.epochs
    log = _Log(await _events(bus))
    await _check_calls(bus, ledger, log, report)
    _check_claims_and_aborts(ledger, log, report)
    _check_ends(ledger, log, report)
    _check_training(log, report)
    _check_files(log, report)
    return report


async def _events(bus: Bus) -> list[AnyEvent]:
    last = (await bus.state(bus.subjects.events_stream)).last_seq
    found: list[AnyEvent] = []
    async with Reader(bus, bus.subjects.events_stream) as reader:
        while len(found) < last:
            found += [read_event(stored) for stored in await reader.read()]
    return found


class _Log:
    """The facts of a log by name."""

    def __init__(self, events: list[AnyEvent]) -> None:
        self.events = events
        self.hive = Hive()
        self.noted: dict[str, list[NotedCall]] = {}
        self.ended: dict[str, list[Outcome]] = {}
        self.evaluated: set[str] = set()
        self.claimed: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        self.batched: Counter[str] = Counter()
        self.dropped: set[str] = set()
        self.batches: Counter[int] = Counter()
        self.steps: dict[int, list[ev.StepCompleted]] = {}
        self.weights: dict[int, list[ev.WeightsReady]] = {}
        for event in events:
            self._apply(event)

    def _apply(self, event: AnyEvent) -> None:
        if isinstance(event, ev.EpisodeEnded):
            event = with_calls(self.hive, event)
        evolve(self.hive, event)
        match event:
            case ev.CallsNoted():
                for call in event.calls:
                    self.noted.setdefault(call.ref.id, []).append(call)
            case ev.EpisodeClaimed():
                self.claimed.update(event.episodes)
            case ev.EpisodeEnded():
                for outcome in event.outcomes:
                    self.ended.setdefault(outcome.episode, []).append(outcome)
                    if event.type == ev.EpisodeType.EVAL:
                        self.evaluated.add(outcome.episode)
            case ev.EpisodeAborted():
                self.aborted.update(event.episodes)
            case _:
                self._apply_training(event)

    def _apply_training(self, event: AnyEvent) -> None:
        match event:
            case ev.GroupDropped():
                self.dropped.update(event.episodes)
            case ev.BatchReady():
                self.batches[event.step] += 1
                self.batched.update(episode.episode for group in event.groups for episode in group.episodes)
            case ev.StepCompleted():
                self.steps.setdefault(event.step, []).append(event)
            case ev.WeightsReady():
                self.weights.setdefault(event.version, []).append(event)
            case _:
                pass


async def _check_calls(bus: Bus, ledger: Ledger, log: _Log, report: Report) -> None:
    """Check that each answered call is noted once, and that its record is what was answered."""
    report.calls_acknowledged = ledger.acknowledged_calls
    for episode, calls in ledger.calls.items():
        for call in calls:
            noted = log.noted.get(call, [])
            if not noted:
                report.lose(f"call {call} of {episode} is not on the log")
                continue
            report.calls_found += 1
            if len(noted) > 1:
                report.double(f"call {call} of {episode} was noted {len(noted)} times")
            stored = await bus.get(bus.subjects.calls_stream, noted[0].ref.seq)
            record = decode_record(stored.data, noted[0].ref)
            text = (record.choices[0].message or {}).get("content") or ""
            if record.episode != episode or text != ledger.texts[call]:
                report.wrong.append(f"call {call} of {episode} is recorded as {record.episode} with the text {text!r}")
        ended = log.ended.get(episode)
        if episode in ledger.ends and ended:
            missing = set(calls) - {ref.id for ref in ended[0].calls}
            if missing:
                report.lose(f"episode {episode} ended without its calls {sorted(missing)}")


def _check_ends(ledger: Ledger, log: _Log, report: Report) -> None:
    report.episodes_ended = len(ledger.ends)
    for episode, reward in ledger.ends.items():
        ended = log.ended.get(episode, [])
        if not ended:
            report.lose(f"the end of {episode}")
        elif len(ended) > 1:
            report.double(f"the end of {episode}")
        elif ended[0].reward != reward:
            report.wrong.append(f"episode {episode} ended with {ended[0].reward}, not {reward}")
    for episode in log.ended:
        if log.aborted[episode]:
            report.double(f"episode {episode} was ended and aborted")


def _check_claims_and_aborts(ledger: Ledger, log: _Log, report: Report) -> None:
    for episode in ledger.claims:
        if log.claimed[episode] != 1:
            report.wrong.append(f"episode {episode} was claimed {log.claimed[episode]} times")
    for episode in ledger.aborts:
        if log.aborted[episode] != 1:
            report.wrong.append(f"the abort of {episode} is {log.aborted[episode]} times on the log")


def _check_training(log: _Log, report: Report) -> None:
    """Check that each ended training episode is in one batch, waits, or was dropped, and each step was done once."""
    last = max(log.batches, default=0)
    for step, batches in log.batches.items():
        done = log.steps.get(step, [])
        if batches > 1 or len(done) > 1:
            report.double(f"step {step}: {batches} batches, {len(done)} completions")
        if not done and step != last:
            report.lose(f"step {step} was sealed and never done")
    trained = {
        episode.episode
        for event in log.events
        if isinstance(event, ev.BatchReady) and event.step in log.steps
        for group in event.groups
        for episode in group.episodes
    }
    for episode, times in log.batched.items():
        if times > 1:
            report.double(f"episode {episode} is in {times} batches")
        if episode not in log.ended:
            report.wrong.append(f"episode {episode} was trained and never ended")
    engine = log.hive.engine("main")
    sealed = set(log.batched) - trained
    for episode in set(log.ended) - log.evaluated - set(log.batched) - log.dropped:
        if episode not in engine.pool:
            report.lose(f"episode {episode} was ended, and neither trained nor dropped, nor does it wait")
    report.steps = len(log.steps)
    report.episodes_trained_once = sum(log.batched[episode] == 1 for episode in trained)
    report.episodes_waiting = len(engine.pool) + len(sealed)
    report.episodes_dropped = len(log.dropped)
    report.episodes_evaluated = len(log.evaluated)


def _check_files(log: _Log, report: Report) -> None:
    """Check that the newest weights and the newest checkpoint are those that the log names."""
    versions = sorted(log.weights)
    if versions != list(range(len(versions))):
        report.wrong.append(f"policy versions {versions} are not in a row")
    for version, ready in log.weights.items():
        if len(ready) > 1:
            report.double(f"version {version}")
    newest = log.weights[versions[-1]][0].weights
    if file_sha256(Path(newest.where) / "model.safetensors") != newest.sha256:
        report.wrong.append(f"the weights of version {versions[-1]} are not those that the log names")
    if log.steps:
        done = log.steps[max(log.steps)][0]
        facts = checkpoint.load(Path(done.checkpoint), done.checkpoint_digest).facts
        if facts.step != done.step:
            report.wrong.append(f"the checkpoint of step {done.step} is one of step {facts.step}")
