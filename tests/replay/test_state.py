"""`bombus replay state` and `diff`: the hive at a position of its log, and what changed between two."""

import json

import pytest

from bombus.cli import main
from bombus.hive.state import EngineState, Hive
from bombus.replay.diff import Change, Verb, as_text, changes
from tests.logs.facts import TINY, recorded

Capture = pytest.CaptureFixture[str]
FACTS = recorded(TINY)


def output(capsys: Capture, command: str, *words: str) -> str:
    assert main(["replay", command, "--log", str(TINY), *words]) == 0
    return capsys.readouterr().out


def test_the_state_at_the_end_is_what_the_log_folds_to(capsys: Capture) -> None:
    state = json.loads(output(capsys, "state", "--json"))
    (engine,) = state["engines"]
    assert state["seq"] == FACTS["events"]
    assert (engine["phase"], engine["run"], engine["pool_episodes"]) == ("ENGINE.ROLLING", 2, 1)
    assert f"after event {FACTS['events']}" in output(capsys, "state")


def test_the_state_before_anything_happened_has_no_engine(capsys: Capture) -> None:
    assert "no engine yet" in output(capsys, "state", "--at", "1")
    assert json.loads(output(capsys, "state", "--at", "0", "--json"))["engines"] == []


def test_a_position_beyond_the_end_is_refused_with_the_end(capsys: Capture) -> None:
    for words in (["state", "--at", "1000"], ["diff", "1", "1000"]):
        assert main(["replay", *words, "--log", str(TINY)]) == 1
        assert f"no event 1000: {TINY} ends at {FACTS['events']}" in capsys.readouterr().err


def test_a_diff_shows_what_an_event_changed(capsys: Capture) -> None:
    (dropped,) = json.loads("[" + _timeline(capsys, "group.dropped") + "]")
    seq = dropped["seq"]
    found = json.loads(output(capsys, "diff", str(seq - 1), str(seq), "--json"))
    left = {tuple(change["path"][2:]): change["verb"] for change in found if change["path"][:1] == ["engines"]}
    for episode in dropped["event"]["episodes"]:
        assert left["pool", episode] == "removed"
    assert left["counters", "dropped"] == "changed"
    assert "- engines.main.pool (2)" in output(capsys, "diff", str(seq - 1), str(seq))


def _timeline(capsys: Capture, kind: str) -> str:
    return output(capsys, "timeline", "--kind", kind, "--json").strip()


def test_positions_in_the_wrong_order_are_bad_usage(capsys: Capture) -> None:
    assert main(["replay", "diff", "9", "3", "--log", str(TINY)]) == 2
    assert "give the earlier position first" in capsys.readouterr().err
    assert "nothing changed between 9 and 9" in output(capsys, "diff", "9", "9")


def test_changes_name_their_paths() -> None:
    before = Hive(epoch=1, engines={"a": EngineState(name="a", run=1, agreed={"x", "y"})})
    after = Hive(epoch=1, engines={"a": EngineState(name="a", run=2, agreed={"y", "x"}), "b": EngineState(name="b")})
    first, second = changes(before, after)
    assert first == Change(path=("engines", "a", "run"), verb=Verb.CHANGED, before=1, after=2)
    assert (second.path, second.verb, second.after["name"]) == (("engines", "b"), Verb.ADDED, "b")
    assert changes(after, after) == []


def test_many_changes_of_one_collection_are_summed_up() -> None:
    added = [Change(path=("pool", f"e{number}"), verb=Verb.ADDED, after={"reward": 1}) for number in range(100)]
    lines = as_text(added)
    assert lines[0] == "+ pool (100)"
    assert lines[-1].strip() == "and 94 more"
    assert len(lines) == 8


def test_two_long_texts_are_shown_from_where_they_differ() -> None:
    before, after = ("x" * 100 + tail for tail in ("one", "two"))
    (line,) = as_text([Change(path=("where",), verb=Verb.CHANGED, before=before, after=after)])
    assert line == "  where: …xxxxxxxxxxone -> …xxxxxxxxxxtwo"
