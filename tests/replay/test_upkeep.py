"""`bombus log check` and `bombus log compact` on real logs, good and bad."""

import asyncio
import base64

import msgspec
import pytest

from bombus.bus import EPOCH, INBOX, Bus, snapshots
from bombus.bus.snapshots import Snapshot
from bombus.bus.streams import blob_stream
from bombus.cli import main
from bombus.commands import log
from bombus.errors import LogCorrupted, Refused
from bombus.hive import events as ev
from bombus.hive import levels
from bombus.hive.events import Event
from bombus.hive.levels import LEVEL
from bombus.hive.records import CallRef
from bombus.hive.state import FOLD, EngineState, Hive
from bombus.replay import upkeep
from bombus.replay.source import BusSource
from tests.bus.test_snapshots import folded, play, put, save, two_snapshots
from tests.coordinator.test_operations_on_a_bus import OPERATIONS, SESSIONS, client, trainer
from tests.coordinator.test_shell import boot, leading, log_of
from tests.logs.facts import TINY
from tests.patience import PATIENCE_S


async def append(bus: Bus, event: Event, epoch: int, answers: int) -> None:
    """Append an event as no coordinator would."""
    subject = bus.subjects.event(event.engine, ev.kind_of(event))
    headers = {EPOCH: str(epoch), INBOX: str(answers)}
    await bus.publisher.publish(
        subject, ev.encode_event(event), msg_id=f"forged {answers} {event.engine}", headers=headers
    )


async def test_a_valid_log_agrees_with_its_snapshots(bus: Bus) -> None:
    await two_snapshots(bus)
    newest = await bus.last(bus.subjects.events_stream)
    assert newest is not None
    seen: list[tuple[int, int]] = []
    verified = await upkeep.check(BusSource(bus, "the log"), lambda position, end: seen.append((position, end)))
    assert (verified.first, verified.last, verified.epochs) == (1, newest.seq, 1)
    assert verified.agreed == (8, 14)
    assert seen[-1] == (newest.seq, newest.seq)


async def all_completed(bus: Bus) -> None:
    """Wait until the log has the result of each operation: a trainer does not wait for the last ones."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            completed = [stored for stored in await log_of(bus) if stored.subject.endswith(".operation.completed")]
            if len(completed) == OPERATIONS * len(SESSIONS):
                return
            await asyncio.sleep(0.01)


async def test_the_bodies_and_results_of_operations_are_read_and_their_loss_is_found(bus: Bus) -> None:
    async with leading(bus):
        await asyncio.gather(trainer(bus), *(client(bus, session) for session in SESSIONS))
        await all_completed(bus)
    verified = await upkeep.check(BusSource(bus, "the log"))
    assert verified.bodies == 2 * OPERATIONS * len(SESSIONS), (
        "each has a body, which no recovery checkpoint has, and a result"
    )
    await bus.purge_below(bus.subjects.ops_stream, 3)
    with pytest.raises(LogCorrupted):
        await upkeep.check(BusSource(bus, "the log"))


async def test_a_multi_model_episode_that_ends_in_parts_is_found(bus: Bus) -> None:
    async with leading(bus):
        pass
    newest = await bus.last(bus.subjects.events_stream)
    assert newest is not None
    epoch, answers = int(newest.headers[EPOCH]), int(newest.headers[INBOX])
    parts = {"big": "big-1-1", "small": "small-1-1"}
    for engine, episode in parts.items():
        partners: dict[str, tuple[str, ...]] = {name: (other,) for name, other in parts.items() if name != engine}
        claimed = ev.EpisodeClaimed(
            engine=engine, run=1, claim="c", client="c1", episodes=(episode,), partners=partners
        )
        await append(bus, claimed, epoch, answers + 1)
    await upkeep.check(BusSource(bus, "the log"))
    aborted = ev.EpisodeAborted(engine="big", run=1, episodes=("big-1-1",), reason=ev.AbortReason.CLIENT)
    await append(bus, aborted, epoch, answers + 2)
    with pytest.raises(LogCorrupted, match="small-1-1 was not aborted with the rest of its multi-model episode"):
        await upkeep.check(BusSource(bus, "the log"))
    outcome = ev.Outcome(episode="small-1-1", task="t", reward=1.0, digest=b"d")
    ended = ev.EpisodeEnded(engine="small", run=1, client="c1", outcomes=(outcome,))
    await append(bus, ended, epoch, answers + 2)
    with pytest.raises(LogCorrupted, match="small-1-1 was not aborted with the rest"):
        await upkeep.check(BusSource(bus, "the log"))


async def test_an_operation_that_is_completed_twice_is_found(bus: Bus) -> None:
    async with leading(bus):
        await asyncio.gather(trainer(bus), *(client(bus, session) for session in SESSIONS))
        await all_completed(bus)
    log = [ev.decode_event(stored.data) for stored in await log_of(bus)]
    newest = await bus.last(bus.subjects.events_stream)
    assert newest is not None
    again = next(event for event in log if isinstance(event, ev.OperationCompleted))
    await append(bus, again, int(newest.headers[EPOCH]), int(newest.headers[INBOX]))
    with pytest.raises(LogCorrupted, match=r"is impossible: operation 1 of .*:train:0 is completed twice"):
        await upkeep.check(BusSource(bus, "the log"))


async def test_an_empty_log_is_valid(bus: Bus) -> None:
    assert (await upkeep.check(BusSource(bus, "the log"))).last == 0


async def test_a_snapshot_that_is_not_the_fold_is_found(bus: Bus) -> None:
    await two_snapshots(bus)
    hive = await folded(bus, 14)
    hive.engines["main"].counters.trained += 1
    await put(bus, 14, hive=hive)
    with pytest.raises(LogCorrupted, match="event 14 is not the fold"):
        await upkeep.check(BusSource(bus, "the log"))


def test_a_metric_that_is_not_a_number_does_not_make_a_snapshot_differ() -> None:
    done = ev.StepCompleted(
        engine="main",
        run=1,
        step=1,
        trainer_epoch=1,
        checkpoint="",
        checkpoint_digest="",
        metrics={"loss": float("nan")},
    )
    hive = Hive(engines={"main": EngineState(name="main", step_done=done)})
    start = Snapshot(fold=FOLD, position=7, event_id="", answered=0, hive=hive)
    taken = snapshots.decode(snapshots.encode(start))
    upkeep.LogCheck(start).compare(taken)
    taken.hive.engines["main"].step = 3
    with pytest.raises(LogCorrupted, match="not the fold"):
        upkeep.LogCheck(start).compare(taken)


async def test_a_damaged_snapshot_is_found(bus: Bus) -> None:
    await two_snapshots(bus)
    await save(bus, b"rubbish", 14)
    with pytest.raises(LogCorrupted, match="snapshot at event 14"):
        await upkeep.check(BusSource(bus, "the log"))


async def test_a_snapshot_that_is_removed_while_the_log_is_verified_is_not_a_fault(bus: Bus) -> None:
    await two_snapshots(bus)
    await put(bus, 4)
    stem = f"$O.{bus.subjects.blobs_bucket}.M."
    subject = stem + base64.urlsafe_b64encode(b"snapshot-0000000000000004").decode()
    newest = await bus.last(blob_stream(bus.subjects), subject)
    assert newest is not None
    removed = newest.data.replace(b'"name"', b'"deleted":true,"name"')
    await bus.publisher.publish(subject, removed, msg_id="removed", headers={})
    assert 4 in await snapshots.positions(bus)
    assert (await upkeep.check(BusSource(bus, "the log"))).agreed == (8, 14)


@pytest.mark.parametrize(("epoch", "answers"), [(0, 1_000), (2, 1_000), (1, 1)])
async def test_an_event_that_no_leader_would_have_written_is_found(bus: Bus, epoch: int, answers: int) -> None:
    async with leading(bus):
        await boot(bus)
    await append(bus, ev.EngineProgressed(engine="main", run=1, stage="x"), epoch, answers)
    with pytest.raises(LogCorrupted, match=r"epoch|answers"):
        await upkeep.check(BusSource(bus, "the log"))


async def test_a_call_that_is_gone_is_found(bus: Bus) -> None:
    await two_snapshots(bus)
    outcome = ev.Outcome(episode="main-1-99", task="t", reward=1.0, digest=b"d")
    lost = msgspec.structs.replace(outcome, calls=(CallRef(999, "lost", b"d" * 16),))
    newest = await bus.last(bus.subjects.events_stream)
    assert newest is not None
    event = ev.EpisodeEnded(engine="main", run=1, client="c", outcomes=(lost,))
    await append(bus, event, 1, int(newest.headers[INBOX]))
    with pytest.raises(LogCorrupted, match="call lost at 999 is no longer kept"):
        await upkeep.check(BusSource(bus, "the log"))


async def test_r12_compacting_keeps_two_snapshots_and_everything_after_the_older(bus: Bus) -> None:
    everything = await two_snapshots(bus)
    assert await upkeep.compact(bus) == 7
    verified = await upkeep.check(BusSource(bus, "the log"))
    assert (verified.first, verified.agreed) == (9, (14,))
    assert await upkeep.compact(bus) == 0, "compacting again changes nothing"
    async with leading(bus) as coordinator:
        await play(bus, 100, 1)
        assert set(everything.engine("main").pool) < set(coordinator.core.hive.engine("main").pool)


async def test_a_log_without_two_good_snapshots_is_not_compacted(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus, batch_size=1000)
        await play(bus, 0, 5)
    with pytest.raises(Refused, match="0 of 2"):
        await upkeep.compact(bus)
    await put(bus, 8)
    with pytest.raises(Refused, match="1 of 2"):
        await upkeep.compact(bus)
    await save(bus, b"rubbish", 14)
    with pytest.raises(LogCorrupted):
        await upkeep.compact(bus)
    assert (await bus.state(bus.subjects.events_stream)).first_seq == 1


async def test_an_operator_checks_and_compacts_by_command(
    bus: Bus, nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await two_snapshots(bus)
    where = ["--nats", nats_url, "--hive", bus.subjects.hive]

    async def run(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, ["log", *words, *where])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    code, out, _ = await run("check")
    assert code == 0
    assert "1 epoch\n" in out
    assert "the snapshot at event 14 is the fold" in out
    code, out, _ = await run("compact")
    assert (code, "removed 7 events" in out) == (0, True)
    code, out, _ = await run("check")
    assert (code, "from 9 to" in out) == (0, True)
    await save(bus, b"rubbish", 14)
    for command in ("check", "compact"):
        code, out, err = await run(command)
        assert (code, out) == (1, "")
        assert "the snapshot at event 14" in err


async def test_a_check_says_whether_this_release_can_continue_an_archive_and_be_rolled_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["log", "check", "--log", str(TINY)]
    assert await asyncio.to_thread(main, command) == 0
    assert f"feature level {LEVEL}, which is this release's" in capsys.readouterr().out
    monkeypatch.setattr(levels, "LEVEL", LEVEL + 1)
    monkeypatch.setattr(log, "LEVEL", LEVEL + 1)
    assert await asyncio.to_thread(main, command) == 0
    assert f"be rolled back, until `bombus up --raise-level` raises it to {LEVEL + 1}" in capsys.readouterr().out
    monkeypatch.setattr(levels, "LEVEL", LEVEL - 1)
    assert await asyncio.to_thread(main, command) == 1
    assert f"at feature level {LEVEL}" in capsys.readouterr().err
