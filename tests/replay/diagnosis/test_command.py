"""`bombus diagnose` on recorded logs, on a folder without services, and on logs of every kind of run."""

import asyncio
import json
from pathlib import Path
from random import Random

import pytest

from bombus.cli import main
from bombus.commands.diagnose import lines_of
from bombus.config.job import RunConfig
from bombus.hive import events as ev
from bombus.hive.events import AnyEvent, Collection, EpisodeType
from bombus.hive.state import Hive
from bombus.insight.runs import Runs
from bombus.replay.archive import FileSource
from bombus.replay.diagnosis.diagnose import diagnose
from bombus.replay.diagnosis.steps import RunSeries, StepFigures
from bombus.replay.source import NotOnLog
from tests.logs.facts import TINY
from tests.replay.diagnosis.rows import spread
from tests.replay.diagnosis.test_steps import batch, completed, outcome

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[3]
CONFIG = RunConfig().to_json()


def configured(engine: str = "main") -> ev.EngineConfigured:
    return ev.EngineConfigured(engine=engine, config=CONFIG, config_digest="d", collection=Collection(), model="tiny")


def started(engine: str = "main", run: int = 1, base: str = "", digest: str = "d") -> ev.EngineStarted:
    return ev.EngineStarted(engine=engine, run=run, config_digest=digest, base=base)


def found(*events: AnyEvent) -> Runs:
    runs = Runs(Hive())
    for seq, event in enumerate(events, 1):
        runs.note(seq, event)
    return runs


def test_a_log_is_diagnosed_and_the_exit_code_says_whether_something_was_found(capsys: Capture) -> None:
    code = main(["diagnose", "--log", str(TINY), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert (code, shown["run"]) == (int(bool(shown["findings"])), "main-2")
    assert main(["diagnose", "--log", str(TINY)]) == code
    printed = capsys.readouterr().out
    assert f"main-2, steps 1 to {shown['steps']}" in printed
    assert ("No problem was found" in printed) == (code == 0)


def test_an_earlier_run_is_diagnosed_and_what_is_missing_is_refused_in_a_sentence(
    capsys: Capture, tmp_path: Path
) -> None:
    assert main(["diagnose", "main-1", "--log", str(TINY)]) == 0
    assert "main-1, steps 1 to 2" in capsys.readouterr().out
    for words, why in (
        (["main-77", "--log", str(TINY)], "no run or engine main-77; its runs are main-1, main-2"),
        (["--log", str(tmp_path / "none")], "there is no file"),
        (["--data", str(tmp_path)], "has no log"),
    ):
        assert main(["diagnose", *words]) == 1
        told = capsys.readouterr()
        assert (told.out, told.err.startswith("bombus diagnose: "), why in told.err) == ("", True, True)


def test_the_pages_show_what_is_printed() -> None:
    """The run that they show has four groups of eight in each step. In its second step, one episode had a reward."""
    series = RunSeries("main", 1, RunConfig.model_validate({"rollout": {"num_repeat": 8}}))
    series.steps = [
        StepFigures(step=step, seq=24 if step == 1 else 0, groups=4, silent=spread(0, 0, 3 if step == 2 else 4))
        for step in range(1, 21)
    ]
    shown = "\n".join(lines_of(series, diagnose(series.steps, series.job), "the log in .bombus"))
    assert "too hard: " in shown
    for page in ("README.md", "docs/diagnose.md"):
        assert f"```\n{shown}\n```" in (ROOT / page).read_text(), page


@pytest.mark.parametrize(("gain", "is_said"), [(0.0, True), (-0.01, True), (0.02, False)])
def test_a_run_without_a_finding_whose_reward_has_not_risen_is_not_called_well(gain: float, is_said: bool) -> None:
    series = RunSeries("main", 1, RunConfig())
    rewards = [0.3 + gain * step + 0.01 * (-1) ** step for step in range(20)]
    series.steps = [StepFigures(rewards=spread(each), lowest=0.0, highest=1.0) for each in rewards]
    shown = "\n".join(lines_of(series, [], "log"))
    assert ("the mean reward has not risen" in shown) == is_said
    series.steps = [StepFigures(rewards=spread(0.95), lowest=0.0, highest=1.0)] * 20
    assert "has not risen" not in "\n".join(lines_of(series, [], "log")), "it cannot rise much more"


def test_the_run_is_the_newest_of_the_engine_that_is_named() -> None:
    log: list[AnyEvent] = [configured(), started(), started(run=2), configured("other"), started("other")]
    assert found(*log).newest("main", "log").name == "main-2"
    assert found(*log).newest("main-1", "log").name == "main-1"
    with pytest.raises(NotOnLog, match="name one of main, other"):
        found(*log).newest("", "log")


def test_a_run_without_steps_of_our_trainer_is_not_diagnosed() -> None:
    for other in (started(run=2, base="smollm2"), started(run=2, digest="")):
        assert found(configured(), started(), other).newest("", "log").name == "main-1"
        with pytest.raises(NotOnLog, match="no run of a job"):
            found(configured(), other).newest("", "log")


def test_a_run_that_is_only_evaluated_has_no_step() -> None:
    ended = ev.EpisodeEnded(engine="main", run=1, client="x", type=EpisodeType.EVAL, outcomes=(outcome("a", "t", 1.0),))
    series = found(configured(), started(), ended).newest("main", "log")
    (line,) = lines_of(series, diagnose(series.steps, series.job), "log")
    assert line == "log: main-1 has completed no step: `bombus why` says what it waits for"


def test_events_of_other_engines_and_later_runs_do_not_count() -> None:
    ended = ev.EpisodeEnded(engine="main", run=1, client="x", outcomes=(outcome("a", "t", 1.0),))
    theirs = ev.EpisodeEnded(engine="other", run=1, client="x", outcomes=(outcome("b", "t", 0.0),))
    later = ev.EpisodeEnded(engine="main", run=2, client="x", outcomes=(outcome("c", "t", 0.0),))
    log: list[AnyEvent] = [
        configured(),
        started(),
        ended,
        theirs,
        batch(1, ("t", {"a": 1.0})),
        completed(1),
        started(run=2),
        later,
    ]
    (row,) = found(*log).newest("main-1", "log").steps
    assert (row.ended, row.rewards.count, row.rewards.mean) == (1, 1, 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_log_cut_anywhere_is_diagnosed(seed: int) -> None:
    async def events() -> list[AnyEvent]:
        with FileSource.open(TINY) as source:
            return [entry.event async for entry in source.events()]

    chance, log = Random(seed), asyncio.run(events())
    start, end = sorted(chance.sample(range(len(log) + 1), 2))
    series = found(configured(), started(), started(run=2), *log[start:end]).newest("", "log")
    assert diagnose(series.steps, series.job) == []
