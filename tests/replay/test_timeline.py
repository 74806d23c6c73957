"""`bombus replay timeline`: what happened, filtered, as text or as JSON."""

import asyncio
import json
import re
import time
from collections import Counter
from datetime import datetime

import msgspec
import pytest

from bombus.bus import Bus
from bombus.cli import main
from bombus.config.job import RunConfig
from bombus.hive.describe import line_of
from bombus.hive.events import (
    AdapterShape,
    EpisodeClaimed,
    EpisodeEnded,
    EpisodesTaken,
    ModelShape,
    OperationCompleted,
    Outcome,
    SamplerWeights,
    kind_of,
)
from bombus.hive.records import BodyRef
from bombus.replay.logged_run import LoggedRun
from bombus.replay.moments import moment
from bombus.replay.running import BadUsage
from bombus.replay.source import BusSource, NotOnLog
from bombus.replay.timeline import KINDS, Filter, about, is_of_model, select
from tests.coordinator.test_operations_on_a_bus import OPERATIONS, SESSIONS, client, trainer
from tests.coordinator.test_shell import leading
from tests.logs.facts import TINY, recorded

Capture = pytest.CaptureFixture[str]
FACTS = recorded(TINY)
SECOND = 1_000_000_000
NOON_NS = int(datetime(2026, 1, 31, 12).timestamp()) * SECOND


def lines(capsys: Capture, *words: str) -> list[str]:
    """Return the lines of the golden log's timeline, without those that name a day."""
    assert main(["replay", "timeline", "--log", str(TINY), *words]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("-- ")]


def events(capsys: Capture, *words: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines(capsys, "--json", *words)]


def test_every_event_is_a_line(capsys: Capture) -> None:
    shown = lines(capsys)
    assert [int(line.split()[0]) for line in shown] == list(range(1, FACTS["events"] + 1))
    assert any("episode.aborted" in line and "infra (the tool's server was away)" in line for line in shown)


def test_kinds_are_filtered_and_an_unknown_kind_is_refused(capsys: Capture) -> None:
    for kind, count in FACTS["kinds"].items():
        assert kind in KINDS
        assert len(lines(capsys, "--kind", kind)) == count
    both = lines(capsys, "--kind", "batch.ready", "step.completed")
    assert len(both) == FACTS["kinds"]["batch.ready"] + FACTS["kinds"]["step.completed"]
    with pytest.raises(SystemExit) as refused:
        main(["replay", "timeline", "--log", str(TINY), "--kind", "batch.redy"])
    assert refused.value.code == 2


def test_an_episodes_timeline_shows_only_its_part_of_each_event(capsys: Capture) -> None:
    shown = lines(capsys, "--episode", "main-1-5")
    assert [line.split()[3] for line in shown] == [
        "episode.claimed", "calls.noted", "calls.noted", "calls.noted", "episode.ended", "batch.ready",
    ]  # fmt: skip
    assert re.search(r"main-1-5 ended, reward 0\.[27]50, task tree", shown[-2])
    assert lines(capsys, "--episode", "main-1-5", "--kind", "engine.failed") == []
    assert lines(capsys, "--episode", "main-1-5.the-secret-of-its-claim") == shown


def test_a_missing_episode_is_refused_with_the_command_that_lists_those_that_exist(capsys: Capture) -> None:
    assert main(["replay", "timeline", "--log", str(TINY), "--episode", "main-1-99"]) == 1
    assert "has no episode main-1-99: `bombus replay episodes` lists those that have ended" in capsys.readouterr().err


def test_a_timeline_is_narrowed_by_position_limit_and_engine(capsys: Capture) -> None:
    assert [entry["seq"] for entry in events(capsys, "--after", "10", "--limit", "3")] == [11, 12, 13]
    hive_only = events(capsys, "--engine", "other")
    assert {entry["event"]["kind"] for entry in hive_only} == {"epoch.opened"}  # type: ignore[index]
    assert main(["replay", "timeline", "--log", str(TINY), "--limit", "0"]) == 2


def test_with_nothing_to_show_the_end_of_the_log_is_printed(capsys: Capture) -> None:
    last = events(capsys)[-1]
    for words in (["--after", "99999"], ["--after", str(last["seq"]), "--json"], ["--until", "2001-01-01T00:00"]):
        assert main(["replay", "timeline", "--log", str(TINY), *words]) == 0
        printed = capsys.readouterr()
        kind = last["event"]["kind"]  # type: ignore[index]
        assert printed.out == ""
        assert f"nothing to show; the last event of {TINY} is {last['seq']}, {kind}, at 20" in printed.err
    lines(capsys, "--after", str(int(str(last["seq"])) - 1))
    assert "nothing to show" not in capsys.readouterr().err


def test_a_timeline_is_narrowed_by_time_from_both_ends(capsys: Capture) -> None:
    everything = events(capsys)
    stamps = [int(str(entry["time_ns"])) for entry in everything]
    late = events(capsys, "--since=-1s")
    assert late == [entry for entry, at in zip(everything, stamps) if at >= stamps[-1] - SECOND]
    early = events(capsys, "--until", "+5s")
    assert early == [entry for entry, at in zip(everything, stamps) if at <= stamps[0] + 5 * SECOND]
    assert 0 < len(late) < len(everything) > len(early) > 0
    assert main(["replay", "timeline", "--log", str(TINY), "--since", "yesterday"]) == 2
    assert "is not a time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "after_noon_s"),
    [("-10m", -600), ("10m", -600), ("1.5h", -5400), ("+30s", 30 - 3600), ("2026-01-31T12:00:05", 5),
     ("12:00", 0), ("9:30:00", -9000), ("12:00:00.250", 0.25)],
)  # fmt: skip
def test_times_are_read_as_a_person_means_them(text: str, after_noon_s: float) -> None:
    assert moment(text, NOON_NS - 3600 * SECOND, NOON_NS) == NOON_NS + int(after_noon_s * SECOND)


def test_a_time_with_a_zone_is_not_local() -> None:
    assert moment("1970-01-01T00:00:01+00:00", 0, time.time_ns()) == SECOND
    with pytest.raises(BadUsage):
        moment("25:00:00", 0, NOON_NS)


def test_the_part_of_an_event_that_is_about_an_episode() -> None:
    claimed = EpisodeClaimed(run=1, claim="c", client="a", episodes=("e1", "e2"))
    assert about(claimed, "e2") == EpisodeClaimed(run=1, claim="c", client="a", episodes=("e2",))
    assert about(claimed, "e3") is None
    multi = msgspec.structs.replace(claimed, partners={"small": ("s1", "s2")})
    assert about(multi, "e2") == EpisodeClaimed(
        run=1, claim="c", client="a", episodes=("e2",), partners={"small": ("s2",)}
    )
    assert line_of(multi) == "a claimed e1 and 1 more (train, together with s1 and 1 more)"
    mine, other = (Outcome(episode=name, task="t", reward=0.0, digest=b"") for name in ("e1", "e2"))
    ended = EpisodeEnded(run=1, client="a", outcomes=(mine, other))
    assert about(ended, "e1") == EpisodeEnded(run=1, client="a", outcomes=(mine,))


async def test_what_was_done_with_a_model_is_shown_and_that_its_run_has_no_batches(bus: Bus) -> None:
    async with leading(bus):
        await asyncio.gather(trainer(bus), *(client(bus, session) for session in SESSIONS))
    source = BusSource(bus, "the bus")
    entries = [event async for _, event in select(source, Filter(model="ann:train:0"))]
    kinds = Counter(kind_of(event) for event in entries)
    assert kinds == {"model.opened": 1, "operation.accepted": OPERATIONS, "operation.completed": OPERATIONS}
    assert {getattr(event, "model", "") for event in entries} == {"ann:train:0"}
    job = RunConfig.model_validate({"model": {"path": "tiny"}})
    with pytest.raises(NotOnLog, match="run 1 of engine main served training operations and made no batches"):
        LoggedRun(engine="main", run=1, job=job, job_digest="d", serves=True).step(1)


def test_episodes_that_play_with_a_model_are_about_it() -> None:
    weights = SamplerWeights(checkpoint="m/sampler/one", address="aa", folder="/w")
    claimed = EpisodeClaimed(run=1, claim="c", client="a", episodes=("e1",), sampler=weights)
    assert is_of_model(claimed, "m")
    assert not is_of_model(claimed, "m/sampler")
    assert not is_of_model(EpisodeClaimed(run=1, claim="c", client="a", episodes=("e1",)), "m")
    taken = EpisodesTaken(run=1, client="a", episodes=("e1", "e2"))
    assert about(taken, "e2") == taken


def test_the_seed_of_a_model_is_told_when_it_is_made() -> None:
    made = ModelShape(adapter=AdapterShape(rank=8, alpha=16.0, seed=3))
    operation = {"run": 1, "model": "m", "number": 1, "key": "0", "op": "create_model", "trainer_epoch": 1}
    body = BodyRef(seqs=(1,), size=1, digest=b"")
    assert line_of(OperationCompleted(**operation, result=body, made=made)) == "create_model 1 of m executed, seed 3"  # type: ignore[arg-type]
