"""The coordinator's shell on a real log: rules R1 to R5, R8, R13 and R19 of the protocol."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bombus.bus import EPOCH, INBOX, TRACEPARENT, Bus, Outgoing, Reader, Stored, append
from bombus.bus.follow import Follower
from bombus.errors import Code, Deposed, NewerLevel, Refused
from bombus.hive import events as ev
from bombus.hive import inbox, levels
from bombus.hive.events import Collection, EpisodeType, NotedCall, Weights
from bombus.hive.records import CallRef
from bombus.hive.state import Phase
from bombus.hive.status.text import render_status
from bombus_coordinator.recovery import Fold
from bombus_coordinator.shell import Coordinator, Housekeeping
from tests.patience import PATIENCE_S

ENGINE = "main"


@asynccontextmanager
async def leading(bus: Bus, trim_s: float = 10.0, raise_level: bool = False) -> AsyncIterator[Coordinator]:
    """Lead for the length of the block, then stop without cleaning up, as in a crash."""
    coordinator = Coordinator(bus, housekeeping=Housekeeping(trim_s=trim_s, raise_level=raise_level))
    task = asyncio.create_task(coordinator.lead())
    ready = asyncio.create_task(coordinator.leading.wait())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield coordinator
    finally:
        task.cancel()
        await asyncio.gather(task, ready, return_exceptions=True)


async def boot(bus: Bus, batch_size: int = 1, num_repeat: int = 2) -> None:
    rules = Collection(batch_size=batch_size, num_repeat=num_repeat)
    await bus.inbox.request(
        inbox.Configure(id="configure", engine=ENGINE, config="{}", config_digest="d", collection=rules, model="tiny")
    )
    await bus.inbox.request(inbox.Start(id="start", engine=ENGINE))
    await bus.inbox.send(inbox.ReplicaAlive(id="alive", engine=ENGINE, replica="r1", url="http://r1"))
    opened = await bus.inbox.request(inbox.TrainerOpens(id="opens", engine=ENGINE, run=1, trainer="t"))
    assert isinstance(opened, inbox.Done)
    weights = Weights(where="/w/0")
    await bus.inbox.send(
        inbox.WeightsSaved(id="saved", engine=ENGINE, run=1, step=0, trainer_epoch=opened.epoch, weights=weights)
    )
    await bus.inbox.send(inbox.WeightsLoadedFact(id="loaded", engine=ENGINE, run=1, version=0, replica="r1"))


def claim(claim: str, client: str = "c1", **more: object) -> inbox.Claim:
    return inbox.Claim(id=f"ask-{claim}", engine=ENGINE, claim=claim, client=client, **more)  # type: ignore[arg-type]


def end(episode: str, reward: float, client: str = "c1") -> inbox.End:
    result = inbox.EpisodeResult(episode=episode, task="t", reward=reward)
    return inbox.End(id=f"end-{episode}", engine=ENGINE, client=client, results=(result,))


async def log_of(bus: Bus) -> list[Stored]:
    newest = await bus.last(bus.subjects.events_stream)
    found: list[Stored] = []
    if newest is None:
        return found
    async with Reader(bus, bus.subjects.events_stream) as reader:
        while not found or found[-1].seq < newest.seq:
            found += await reader.read()
    return found


async def test_r1_one_author_reads_the_inbox_in_order_and_writes_the_events(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus)
        granted = await bus.inbox.request(claim("k"))
        assert isinstance(granted, inbox.Granted)
    stored = await log_of(bus)
    kinds = [ev.kind_of(ev.decode_event(each.data)) for each in stored]
    assert kinds[:3] == ["epoch.opened", "engine.configured", "engine.started"]
    assert kinds[-1] == "episode.claimed"
    answers = [int(each.headers[INBOX]) for each in stored]
    assert answers == sorted(answers)
    assert {each.headers[EPOCH] for each in stored} == {"1"}


async def test_r2_recovery_continues_after_the_message_that_the_last_event_answers(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus)
        granted = await bus.inbox.request(claim("k"))
        assert isinstance(granted, inbox.Granted)
    # Nobody leads: messages wait in the inbox.
    waiting = asyncio.create_task(bus.inbox.request(end(granted.episodes[0], 1.0), timeout_s=30))
    async with leading(bus) as second:
        assert isinstance(await waiting, inbox.Done)
        engine = second.core.hive.engine(ENGINE)
        assert second.core.hive.epoch == 2
        assert list(engine.pool) == list(granted.episodes)


async def test_r2_every_message_is_answered_by_one_decision_whoever_leads(bus: Bus) -> None:
    """Leaders die while clients repeat their commands: each command is carried out once."""
    done: list[str] = []

    async def client(name: str) -> None:
        for number in range(6):
            granted = await bus.inbox.request(claim(f"{name}-{number}", name, wait_s=2), timeout_s=60)
            assert isinstance(granted, inbox.Granted)
            (episode,) = granted.episodes
            assert isinstance(await bus.inbox.request(end(episode, float(number), name), timeout_s=60), inbox.Done)
            done.append(episode)

    async with leading(bus):
        await boot(bus, batch_size=100)
    async with asyncio.TaskGroup() as clients:
        working = [clients.create_task(client(name)) for name in ("a", "b", "c")]
        while not all(task.done() for task in working):
            async with leading(bus) as coordinator:
                before = len(done)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        while len(done) < before + 3 and not all(task.done() for task in working):
                            await asyncio.sleep(0)
    assert coordinator.core.hive.epoch >= 3
    ended = [
        outcome.episode
        for stored in await log_of(bus)
        if isinstance(event := ev.decode_event(stored.data), ev.EpisodeEnded)
        for outcome in event.outcomes
    ]
    assert sorted(ended) == sorted(done)


async def test_r3_a_refusal_is_checked_against_the_log_and_the_same_command_gets_the_same_answer(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus)
        with pytest.raises(Refused) as refused:
            await bus.inbox.request(end("main-1-99", 1.0))
        assert refused.value.code == Code.UNKNOWN_EPISODE
        granted = await bus.inbox.request(claim("k"))
        assert await bus.inbox.request(claim("k")) == granted


async def test_r3_a_leader_whose_log_has_moved_on_leaves_without_replying(bus: Bus) -> None:
    coordinator = Coordinator(bus)
    task = asyncio.create_task(coordinator.lead())
    await coordinator.leading.wait()
    newest = await bus.last(bus.subjects.events_stream)
    assert newest is not None
    usurper = Outgoing(
        subject=bus.subjects.event("_hive", "epoch.opened"),
        body=ev.encode_event(ev.EpochOpened(epoch=2, leader="usurper")),
        msg_id="2.1",
        headers={EPOCH: "2", INBOX: "0"},
    )
    await append(bus, [[usurper]], newest.seq)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await bus.inbox.request(end("main-1-99", 1.0))
    with pytest.raises(ExceptionGroup) as group:
        await task
    assert group.group_contains(Deposed)


async def test_r4_a_second_leader_deposes_the_first_by_the_fence(bus: Bus) -> None:
    async with leading(bus) as first:
        await boot(bus)
        async with leading(bus) as second:
            granted = await bus.inbox.request(claim("k"), timeout_s=20)
            assert isinstance(granted, inbox.Granted)
            assert (first.core.hive.epoch, second.core.hive.epoch) == (1, 2)
    epochs = [int(stored.headers[EPOCH]) for stored in await log_of(bus)]
    assert epochs == sorted(epochs), "no event of the first epoch is stored after the second one is opened"


async def test_r5_the_leader_puts_time_into_the_log_and_idle_episodes_expire_by_it(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus)
        granted = await bus.inbox.request(claim("k", discard_timeout_s=0.5))
        assert isinstance(granted, inbox.Granted)
        follower = Follower(bus)
        following = asyncio.create_task(follower.run())
        await follower.wait_for(lambda hive: granted.episodes[0] in hive.engine(ENGINE).closed, PATIENCE_S)
        following.cancel()
    closed = follower.hive.engine(ENGINE).closed[granted.episodes[0]]
    assert closed.aborted == ev.AbortReason.IDLE
    last = await bus.last(bus.subjects.inbox_stream, bus.subjects.inbox("tick"))
    assert last is not None
    ticks = [await bus.get(bus.subjects.inbox_stream, seq) for seq in range(1, last.seq + 1)]
    ticked_ns = [stored.time_ns for stored in ticks if stored.subject == last.subject]
    tick = inbox.decode_message(last.data)
    assert isinstance(tick, inbox.Tick)
    assert tick.after_ns == ticked_ns[-2], "each says when the one before it came"


async def test_r5_a_touch_keeps_a_long_generation_alive(bus: Bus) -> None:
    async with leading(bus) as coordinator:
        await boot(bus)
        granted = await bus.inbox.request(claim("k", discard_timeout_s=1.5))
        assert isinstance(granted, inbox.Granted)
        for number in range(8):
            await bus.inbox.send(inbox.Touch(id=f"touch{number}", engine=ENGINE, episodes=granted.episodes))
            newest = await bus.inbox.send(inbox.Tick(id=f"mine{number}"))
            async with asyncio.timeout(PATIENCE_S):
                while coordinator._consumed < newest:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.25)  # real time has to pass: the server stamps it
        assert granted.episodes[0] in coordinator.core.hive.engine(ENGINE).open


async def test_r7_membership_is_frozen_and_a_late_call_is_never_trained(bus: Bus) -> None:
    async with leading(bus) as coordinator:
        await boot(bus)
        granted = await bus.inbox.request(claim("k", type=EpisodeType.TRAIN))
        assert isinstance(granted, inbox.Granted)
        (episode,) = granted.episodes
        for name in ("in-time", "late"):
            noted = NotedCall(episode, CallRef(1, name, b"d" * 16), 5, 3, 0, 0)
            await bus.inbox.send(inbox.CallRecorded(id=name, engine=ENGINE, run=1, call=noted))
            await bus.inbox.request(end(episode, 1.0))
        engine = coordinator.core.hive.engine(ENGINE)
        assert [ref.id for ref in engine.pool[episode].calls] == ["in-time"]
        assert engine.counters.calls_late == 1


async def test_r8_facts_of_another_run_are_ignored(bus: Bus) -> None:
    async with leading(bus) as coordinator:
        await boot(bus)
        await bus.inbox.request(inbox.Stop(id="stop", engine=ENGINE))
        await bus.inbox.request(inbox.Start(id="start-2", engine=ENGINE))
        await bus.inbox.send(inbox.EngineBroke(id="old", engine=ENGINE, run=1, reason="an old complaint"))
        with pytest.raises(Refused):
            await bus.inbox.request(inbox.TrainerOpens(id="old-trainer", engine=ENGINE, run=1, trainer="t"))
        engine = coordinator.core.hive.engine(ENGINE)
        assert (engine.run, engine.phase, engine.version) == (2, Phase.BOOTING, -1)


async def test_r13_a_claim_waits_its_slice_and_is_granted_when_room_appears(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus, batch_size=100)
        first = await bus.inbox.request(claim("all", count=128))
        assert isinstance(first, inbox.Granted)
        waiting = asyncio.create_task(bus.inbox.request(claim("next", "c2", wait_s=5)))
        await bus.inbox.request(inbox.Abort(id="abort", engine=ENGINE, client="c1", episodes=first.episodes[:1]))
        assert isinstance(await waiting, inbox.Granted)


async def test_a_claim_that_waited_has_its_own_trace_and_not_that_of_the_message_which_made_room(bus: Bus) -> None:
    its_own, of_others = f"00-{1:032x}-{1:016x}-01", f"00-{2:032x}-{2:016x}-01"
    async with leading(bus):
        await boot(bus, batch_size=100)
        first = await bus.inbox.request(claim("all", count=128))
        assert isinstance(first, inbox.Granted)
        waiting = asyncio.create_task(bus.inbox.request(claim("next", "c2", wait_s=5), traceparent=its_own))
        aborts = inbox.Abort(id="abort", engine=ENGINE, client="c1", episodes=first.episodes[:1])
        await bus.inbox.request(aborts, traceparent=of_others)
        await waiting
    traces = {type(ev.decode_event(each.data)): each.headers.get(TRACEPARENT) for each in await log_of(bus)}
    assert traces[ev.EpisodeAborted] == of_others
    assert traces[ev.EpisodeClaimed] == its_own


async def test_r19_two_hives_share_a_server_and_stay_separate(bus: Bus, nats_url: str, hive: str) -> None:
    async with await Bus.connect(nats_url, f"{hive}-b", name="test") as other, leading(bus) as mine:
        await other.ensure_streams()
        async with leading(other) as theirs:
            await boot(bus)
            await boot(other)
            await bus.inbox.request(claim("k"))
            assert len(mine.core.hive.engine(ENGINE).open) == 1
            assert len(theirs.core.hive.engine(ENGINE).open) == 0


def _ended_with(metadata: bytes) -> bytes:
    """Return the end of an episode whose metadata has these bytes of msgpack in it."""
    end = inbox.End(id="e", client="c", results=(inbox.EpisodeResult(episode="e", task="t", metadata={"a": "here"}),))
    return inbox.encode_message(end).replace(b"\xa4here", metadata)


NONSENSE = [
    b"",
    b"\xff nonsense",
    inbox.encode_message(inbox.Stop(id="half")).replace(b"half", b"\xc3("),  # text that is not UTF-8
    _ended_with(b"\x91" * 5000 + b"\x01"),  # lists within each other
    _ended_with(b"\x91" * 200 + b"\x01"),  # which a reader deep in its own work could not decode again
    _ended_with(b"\xd6\xff\x00\x00\x00\x01"),  # a time
    _ended_with(b"\x81\x91\x01\x01"),  # a map whose key is a list
    *(
        inbox.encode_message(inbox.ReplicaAlive(id="r", engine=name, replica="r", url="u"))
        for name in ("\r\nPUB x 1", "a b", "*", "")
    ),
]


async def test_nonsense_in_the_inbox_does_not_stop_the_hive(bus: Bus) -> None:
    async with leading(bus):
        for number, body in enumerate(NONSENSE):
            await bus.publisher.publish(bus.subjects.inbox("claim"), body, msg_id=f"nonsense-{number}")
        await boot(bus)
        assert isinstance(await bus.inbox.request(claim("k")), inbox.Granted)


async def test_the_inbox_is_trimmed_up_to_what_is_decided(bus: Bus) -> None:
    async with leading(bus, trim_s=0.05):
        await boot(bus)
        async with asyncio.timeout(PATIENCE_S):
            while (await bus.state(bus.subjects.inbox_stream)).first_seq == 1:
                await asyncio.sleep(0.02)


async def test_r4_a_log_keeps_its_feature_level_until_it_is_raised_and_then_refuses_older_releases(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(bus) as first:
        await boot(bus)
        assert first.core.hive.level == levels.LEVEL, "a new log begins at the release's own level"
    ours = levels.LEVEL
    monkeypatch.setattr(levels, "LEVEL", ours + 1)  # the next release
    async with leading(bus) as upgraded:
        assert upgraded.core.hive.level == ours
        assert f"--raise-level ({ours + 1})" in render_status(upgraded.core.hive)
    monkeypatch.setattr(levels, "LEVEL", ours)  # rolled back
    async with leading(bus) as rolled_back:
        assert rolled_back.core.hive.epoch == 3
    monkeypatch.setattr(levels, "LEVEL", ours + 1)
    async with leading(bus, raise_level=True) as raised:
        assert raised.core.hive.level == ours + 1
    await raised.leave()  # with a snapshot
    monkeypatch.setattr(levels, "LEVEL", ours)
    last = (await bus.state(bus.subjects.events_stream)).last_seq
    for refused in (Coordinator(bus).lead(), Follower(bus).run(), Fold.begin(bus)):
        with pytest.raises(NewerLevel, match=f"feature level {ours + 1}.* upgrade bombus here"):
            async with asyncio.timeout(PATIENCE_S):
                await refused
    assert (await bus.state(bus.subjects.events_stream)).last_seq == last, "nothing was written"
