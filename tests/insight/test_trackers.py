"""What trackers are given of a log, and the file from which they are filled. The trackers are tested in
tests/trackers, with their own packages."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from bombus.bus import Bus, EmbeddedServer
from bombus.cli import main
from bombus.config.documents import parse_job
from bombus.config.job import Tracker
from bombus.hive.events import AnyEvent, EngineStopped, EpisodeEnded, EpisodeType, StepCompleted
from bombus.hive.state import Hive
from bombus.insight.trackers import filling
from bombus.insight.trackers.adapters import Opened, continues
from bombus.insight.trackers.filling import fill
from bombus.insight.trackers.ledger import RUN as RUN_FILE
from bombus.insight.trackers.ledger import STEPS, InUse, Ledger
from bombus.insight.trackers.rows import (
    VERSION,
    Row,
    ShownSample,
    TrackedRows,
    TrackedRun,
    plain,
    plain_metrics,
    tracked,
)
from tests.conftest import SMALL_STREAMS
from tests.effort import effort
from tests.insight.tracked import HOSTILE, expected, publish, publish_slowly, rows_of, run_of
from tests.logs.facts import TINY
from tests.replay.diagnosis.test_steps import outcome

RUN = TrackedRun(id="id", hive="h", engine="main", run=1, project="p", name="n", digest="d", config={"trainer.lr": 0.1})
SAMPLE = ShownSample(task="t", reward=1.0, prompt="user: 1+1", answer="assistant: 2")


def row(step: int, **more: float) -> Row:
    return Row(step=step, at_ns=1_790_000_000_123_456_789 + step, metrics={"reward/mean": step / 3} | more)


def lines(ledger: Ledger) -> list[dict[str, float]]:
    return [json.loads(line) for line in (ledger.folder / STEPS).read_text().splitlines()]


# ---- rows of a log -------------------------------------------------------------------------------------------------


def test_each_completed_step_is_one_row_with_the_evaluation_before_it_and_the_last_evaluation_is_a_row_alone() -> None:
    events = list(run_of(10, ["jsonl"]))
    rows = rows_of(events)
    assert [each.step for each in rows] == list(range(1, 12))
    figures = expected(events)
    for each in rows[:-1]:
        alone = {name: value for name, value in each.metrics.items() if not name.startswith("held_out/")}
        assert alone == figures[each.step]
    assert {each.step: each.metrics[VERSION] for each in rows if VERSION in each.metrics} == {6: 5.0, 11: 10.0}
    assert set(rows[-1].metrics) == {VERSION, "held_out/mean", "held_out/std", "held_out/episodes", "held_out/pass@1"}


def test_each_evaluated_version_is_in_a_row_in_full_although_evaluations_overlap() -> None:
    events = list(run_of(4, ["jsonl"]))
    steps = [number for number, event in enumerate(events) if isinstance(event, StepCompleted)]

    def played(version: int, name: str, reward: float) -> AnyEvent:
        outcomes = (outcome(name, "t", reward),)
        return EpisodeEnded(
            engine="main", at_ns=9, run=1, client="x", outcomes=outcomes, type=EpisodeType.EVAL, version=version
        )

    events[steps[3] + 1 : steps[3] + 1] = [played(4, "f", 0.0), played(5, "g", 1.0)]
    events[steps[1] : steps[1]] = [played(1, "b", 0.0), played(2, "c", 1.0), played(3, "e", 1.0)]
    events[steps[0] : steps[0]] = [played(1, "a", 1.0), played(2, "d", 1.0)]
    rows = rows_of(events)
    assert [each.step for each in rows] == [1, 2, 3, 4, 5, 6]
    found = [(each.metrics[VERSION], each.metrics["held_out/mean"], each.metrics["held_out/episodes"]) for each in rows]
    assert found == [(1, 1.0, 1), (1, 0.5, 2), (2, 1.0, 2), (3, 1.0, 1), (4, 0.0, 1), (5, 1.0, 1)]


def test_runs_whose_jobs_name_no_tracker_have_no_rows_and_the_next_run_of_their_engine_has() -> None:
    assert rows_of(list(run_of(3, []))) == []
    both = [*run_of(3, []), *run_of(2, ["jsonl"], run=2)]
    assert [each.step for each in rows_of(both)] == [1, 2]


def test_the_same_run_has_the_same_id_and_another_project_name_or_hive_another() -> None:
    rows = TrackedRows(Hive())
    for seq, event in enumerate(run_of(1, ["jsonl"]), 1):
        rows.note(seq, event)
    (series,) = rows.runs.series.values()
    first = tracked("h", series)
    assert first == tracked("h", series)
    assert (first.project, first.name, first.tags["engine"]) == ("small", "small-main-1", "main")
    assert len({tracked(*words).id for words in (("h", series), ("g", series), ("h", series, "p"))}) == 3
    assert first.config["experiment.project_name"] == "small"


@pytest.mark.parametrize("name", [HOSTILE, "", "..", ".", "-rf", "a/b", "\n", "x" * 1000, "con\x00"])
def test_a_name_from_outside_is_the_name_of_one_file_without_markup(name: str) -> None:
    found = plain(name)
    assert found not in ("", ".", "..")
    assert found == Path(found).name
    assert not set(found) & set("<>&/\\\x1b\n\x00")
    assert len(found) <= 100


def test_figures_keep_their_names_where_a_tracker_may_have_them_and_never_share_one() -> None:
    assert plain_metrics({"held_out/pass@1": 1.0, "reward/mean": 2.0}) == {"held_out/pass@1": 1.0, "reward/mean": 2.0}
    found = plain_metrics({f"reported/{HOSTILE}": 1.0, "reported/a<": 2.0, "reported/a>": 3.0, "reported/a_": 4.0})
    assert sorted(found.values()) == [1.0, 2.0, 3.0, 4.0]
    assert not any(set(name) & set("<>\x1b") or ".." in name.split("/") for name in found)
    both = plain_metrics({"reported/pass@1": 1.0, "reported/pass_at_1": 2.0}, at="_at_")
    assert sorted(both.values()) == [1.0, 2.0]
    assert both["reported/pass_at_1"] == 2.0


# ---- the ledger -----------------------------------------------------------------------------------------------------


def test_a_row_is_written_once_and_lines_that_were_cut_off_or_damaged_are_removed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, RUN)
    for step in (1, 2, 2, 1, 3):
        ledger.append(row(step))
    assert [line["step"] for line in lines(ledger)] == [1, 2, 3]
    ledger.close()
    path = ledger.folder / STEPS
    whole = path.read_bytes()
    for cut in (1, 5, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        again = Ledger(tmp_path, RUN)
        assert again.last == 2
        again.append(row(3))
        again.close()
        assert path.read_bytes() == whole
    path.write_bytes(whole.splitlines(keepends=True)[0] + bytes(40) + b"\n" + whole.splitlines(keepends=True)[2])
    damaged = Ledger(tmp_path, RUN)
    assert damaged.last == 1
    damaged.close()


def test_another_process_cannot_write_the_run_at_the_same_time(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, RUN)
    with pytest.raises(InUse, match="another process writes the run n to"):
        Ledger(tmp_path, RUN)
    ledger.close()
    Ledger(tmp_path, RUN).close()


def test_samples_come_with_their_row(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, RUN)
    written = [Row(step=1, at_ns=1, metrics={"reward/mean": 0.1}, samples=(SAMPLE, SAMPLE)), row(2)]
    for each in written:
        ledger.append(each)
    ledger.close()
    again = Ledger(tmp_path, RUN)
    again.end()
    assert [*again.rows()] == written
    assert ["samples" in line for line in lines(again)] == [True, False]
    again.close()


# ---- filling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracker", [Tracker.TENSORBOARD, Tracker.SWANLAB])
def test_a_tracker_that_fails_and_comes_back_has_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: Tracker
) -> None:
    has: list[int] = []  # in memory, in place of the tracker's package
    fails_at: list[int] = []

    @contextmanager
    def opened(run: TrackedRun, folder: Path) -> Iterator[Opened]:
        def write(row: Row) -> None:
            if row.step in fails_at:
                raise ConnectionError("the tracker is away")
            has.append(row.step)

        if not continues(tracker):
            has.clear()
        yield max(has, default=0), write

    monkeypatch.setattr(filling, "ADAPTERS", {tracker: opened})
    monkeypatch.setattr(filling, "is_installed", bool)
    ledger = Ledger(tmp_path, RUN)
    for step in range(1, 9):
        ledger.append(row(step))
    ledger.end()
    for step in (3, 6):
        fails_at[:] = [step]
        with pytest.raises(ConnectionError):
            fill(ledger, tracker)
    fails_at.clear()
    assert fill(ledger, tracker) == (3 if continues(tracker) else 8)
    assert has == list(range(1, 9))
    assert fill(ledger, tracker) == fill(ledger, tracker, ask=True) == 0
    ledger.append(row(9))
    assert fill(ledger, tracker) == (1 if continues(tracker) else 9)
    assert has == list(range(1, 10))
    ledger.close()


# ---- the command ----------------------------------------------------------------------------------------------------


def test_a_finished_run_is_written_again_and_again_without_doubling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["track", "main-1", "--log", str(TINY), "--to", "jsonl", "--folder", str(tmp_path)]
    assert main(words) == main(words) == 0
    (folder,) = tmp_path.iterdir()
    assert [json.loads(line)["step"] for line in (folder / STEPS).read_text().splitlines()] == [1, 2]
    assert capsys.readouterr().out.splitlines()[-1] == f"main-1: {folder} has its steps up to 2"
    assert main([*words, "--name", HOSTILE, "--project", HOSTILE]) == 0
    assert len(list(tmp_path.iterdir())) == 2


async def test_evaluations_after_the_last_step_of_a_stopped_hive_are_written_as_a_run_of_its_own_until_it_goes_on(
    tmp_path: Path,
) -> None:
    events = list(run_of(10, ["jsonl"]))
    words = ["track", "main-1", "--data", str(tmp_path / "data"), "--to", "jsonl", "--folder", str(tmp_path / "to")]

    async def written(until: int, begun: int = 0) -> dict[str, list[int]]:
        """Return the steps of each run's ledger after the hive had these events and was stopped."""
        server = EmbeddedServer(tmp_path / "data" / "nats")
        await asyncio.to_thread(server.start)
        async with await Bus.connect(server.url, "demo") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
            await publish(bus, events[begun:until], begun + 1)
        await asyncio.to_thread(server.stop)
        assert await asyncio.to_thread(main, words) == await asyncio.to_thread(main, words) == 0
        ledgers = (tmp_path / "to").glob(f"*/{STEPS}")
        names = {json.loads((path.parent / RUN_FILE).read_text())["name"]: path for path in ledgers}
        return {name: [json.loads(line)["step"] for line in path.open()] for name, path in names.items()}

    evaluated = max(number for number, event in enumerate(events) if isinstance(event, EpisodeEnded)) + 1
    alone = {f"small-main-1-until-{evaluated}": list(range(1, 12))}
    assert await written(evaluated) == alone
    assert await written(len(events), evaluated) == alone | {"small-main-1": list(range(1, 12))}


def test_what_is_not_installed_or_does_not_fit_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["track", "main-1", "--log", str(TINY), "--folder", str(tmp_path)]
    assert main([*words, "--to", "wandb"]) == 1
    assert "wandb is not installed: pip install" in capsys.readouterr().err
    assert main([*words, "--follow"]) == 2
    assert "--follow writes all runs of a running hive" in capsys.readouterr().err


def test_agentjets_logger_names_trackers_and_what_is_no_tracker_here_has_no_effect() -> None:
    job = parse_job({"ajet": {"trainer_common": {"logger": ["console", "wandb", "clearml"]}}})
    assert job.logging.trackers == (Tracker.WANDB,)
    assert job.ignored == ("ajet.trainer_common.logger",)
    verls = {"actor_rollout_ref": {"model": {"path": "tiny"}}, "trainer": {"logger": ["console", "tensorboard"]}}
    assert parse_job(verls).logging.trackers == (Tracker.TENSORBOARD,)
    assert parse_job(verls).ignored == ()


async def test_a_run_is_followed_over_kills_and_a_tracker_that_fails_is_told_once(
    bus: Bus, nats_url: str, tmp_path: Path
) -> None:
    events: list[AnyEvent] = list(run_of(60, ["wandb", "jsonl"], name=HOSTILE))  # wandb is not installed here
    random = Random(5)
    command = [sys.executable, "-m", "bombus", "track", "--follow", "--nats", nats_url, "--hive", bus.subjects.hive]
    command += ["--folder", str(tmp_path / "trackers")]
    publishing = asyncio.create_task(publish_slowly(bus, events, 0.02))
    for _ in range(effort(2, 20)):
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        await asyncio.sleep(random.uniform(0.5, 2.0))  # time is what is tested: it dies at any moment
        process.kill()
        await process.wait()
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    await publishing
    assert isinstance(events[-1], EngineStopped)
    steps: list[int] = []
    async with asyncio.timeout(60):
        while len(steps) < 61:
            await asyncio.sleep(0.05)
            for path in (tmp_path / "trackers").glob(f"*/{STEPS}"):
                steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    process.terminate()
    _, told = await process.communicate()
    assert process.returncode == 0
    assert told.count(b"is not written to wandb now, and is not affected: wandb is not installed: pip install") == 1
    assert steps == list(range(1, 62))
    (folder,) = (tmp_path / "trackers").iterdir()
    written = {line["step"]: line for line in map(json.loads, (folder / STEPS).read_text().splitlines())}
    for step, figures in expected(events).items():
        assert {name: written[step][name] for name in figures} == figures
