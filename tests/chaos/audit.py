"""Compare the answers that clients got with the log, the trained steps and the weights."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from bombus.bus import Bus, Reader
from bombus.bus.follow import read_event
from bombus.errors import EngineFault
from bombus.hive import events as ev
from bombus.hive.events import AnyEvent
from bombus.hive.fold.evolve import as_folded, evolve
from bombus.hive.records import decode_record
from bombus.hive.state import EngineState, Hive
from bombus.replay import upkeep
from bombus.replay.source import BusSource
from bombus_inference.fetching import Fetcher
from bombus_trainer.publish.checkpoint import verify
from bombus_trainer.publish.step_checkpoint import read_step
from tests.chaos.ledger import Ledger
from tests.chaos.log import EngineLog
from tests.chaos.report import EngineReport, Report


async def audit(bus: Bus, ledgers: Mapping[str, Ledger]) -> Report:
    """Read the whole log and check it. The hive may run, but no agent may play."""
    leaders = (await upkeep.check(BusSource(bus, "the log"))).epochs
    events = await _events(bus)
    report = Report(events=len(events), leaders=leaders)
    hive = Hive()
    for number, event in enumerate(events):
        evolve(hive, event)
        events[number] = as_folded(hive, event)
        if isinstance(event, ev.MessageDeadLettered):
            report.wrong_in_hive.append(f"a message {event.message} became a dead letter: {event.why}")
    for engine, ledger in ledgers.items():
        log = EngineLog(engine, events)
        found = report.engines[engine] = EngineReport(
            replicas_quarantined=len(log.quarantined), pauses=len(log.pauses), errors_seen=ledger.troubles.total()
        )
        found.wrong += [f"the run waits or is over: {why}" for why in log.stops]
        await _check_calls(bus, ledger, log, found)
        _check_claims_and_aborts(ledger, log, found)
        _check_ends(ledger, log, found)
        _check_training(log, hive.engine(engine), found)
        _check_checkpoint(log, found)
        await _check_weights(bus, hive.engine(engine), log, found)
    return report


async def _events(bus: Bus) -> list[AnyEvent]:
    state = await bus.state(bus.subjects.events_stream)
    assert state.first_seq == 1, f"the log begins at event {state.first_seq}: what was before cannot be checked"
    found: list[AnyEvent] = []
    async with Reader(bus, bus.subjects.events_stream) as reader:
        while len(found) < state.last_seq:
            found += [read_event(stored) for stored in await reader.read()]
    return found


async def _check_calls(bus: Bus, ledger: Ledger, log: EngineLog, report: EngineReport) -> None:
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
        for batched in log.batched.get(episode, ()):
            missing = set(calls) - {ref.id for ref in batched.calls}
            if missing:
                report.lose(f"episode {episode} was trained without its calls {sorted(missing)}")


def _check_ends(ledger: Ledger, log: EngineLog, report: EngineReport) -> None:
    report.episodes_ended = len(ledger.ends)
    report.rewards_refused = ledger.refused_rewards
    for episode, reward in ledger.ends.items():
        ended = log.ended.get(episode, [])
        if not ended:
            report.lose(f"the end of {episode}")
        elif len(ended) > 1:
            report.double(f"the end of {episode}")
        elif ended[0].reward != reward:
            report.wrong.append(f"episode {episode} ended with {ended[0].reward!r}, not {reward!r}")
    for episode, outcomes in log.ended.items():
        if log.aborted[episode]:
            report.double(f"episode {episode} was ended and aborted")
        if outcomes[0].reward in ledger.refused.get(episode, ()):
            report.wrong.append(f"episode {episode} ended with {outcomes[0].reward!r}, which was refused")


def _check_claims_and_aborts(ledger: Ledger, log: EngineLog, report: EngineReport) -> None:
    for episode in ledger.claims:
        if log.claimed[episode] != 1:
            report.wrong.append(f"episode {episode} was claimed {log.claimed[episode]} times")
    for episode in ledger.aborts:
        if log.aborted[episode] != 1:
            report.wrong.append(f"the abort of {episode} is {log.aborted[episode]} times on the log")


def _check_training(log: EngineLog, engine: EngineState, report: EngineReport) -> None:
    """Check that each ended training episode is in one batch, waits, or was dropped, and each step was done once."""
    last = max(log.batches, default=0)
    for step, batches in log.batches.items():
        done = log.steps.get(step, [])
        if len(batches) > 1 or len(done) > 1:
            report.double(f"step {step}: {len(batches)} batches, {len(done)} completions")
        if not done and step != last:
            report.lose(f"step {step} was sealed and never done")
    for episode, batched in log.batched.items():
        if len(batched) > 1:
            report.double(f"episode {episode} is in {len(batched)} batches")
        if episode not in log.ended:
            report.wrong.append(f"episode {episode} was trained and never ended")
        elif batched[0].reward != log.ended[episode][0].reward:
            report.wrong.append(f"episode {episode} was trained with the reward {batched[0].reward!r}")
    for episode in set(log.ended) - log.evaluated - set(log.batched) - log.dropped:
        if episode not in engine.pool:
            report.lose(f"episode {episode} was ended, and neither trained nor dropped, nor does it wait")
    report.steps = len(log.steps)
    report.episodes_trained_once = sum(len(log.batched[episode]) == 1 for episode in log.trained)
    report.episodes_waiting = len(engine.pool) + len(set(log.batched) - log.trained)
    report.episodes_dropped = len(log.dropped)
    report.episodes_evaluated = len(log.evaluated)


def _check_checkpoint(log: EngineLog, report: EngineReport) -> None:
    """Check that the newest checkpoint is the one that the log names."""
    if log.steps:
        done = log.steps[max(log.steps)][0]
        found = read_step(Path(done.checkpoint), done.checkpoint_digest)
        verify(found, found.files)
        if found.facts.step != done.step:
            report.wrong.append(f"the checkpoint of step {done.step} is one of step {found.facts.step}")


async def _check_weights(bus: Bus, engine: EngineState, log: EngineLog, report: EngineReport) -> None:
    """Check that versions are in a row, and fetch the newest weights as a new replica does, which compares digests."""
    versions = sorted(log.weights)
    if versions != list(range(len(versions))):
        report.wrong.append(f"policy versions {versions} are not in a row")
    for version, ready in log.weights.items():
        if len(ready) > 1:
            report.double(f"version {version}")
    if not versions:
        return
    with tempfile.TemporaryDirectory(prefix="bombus-audit-") as cache:
        fetcher = Fetcher(bus, engine.name, Path(cache))
        try:
            await fetcher.materialise(log.weights[versions[-1]][0], lambda: engine.trainer_epoch)
        except EngineFault as fault:
            report.wrong.append(f"the weights of version {versions[-1]} cannot be had: {fault}")
        finally:
            fetcher.close()
