"""Names, fields, tags and layouts of everything on the wire and on the log are those that were recorded."""

import json
from typing import Any, get_args

import pytest

from bombus.hive.events import AnyEvent, Event
from bombus.hive.inbox import AnyMessage, Message
from tests.hive.wire_names import SNAPSHOT, wire_names

RECORDED: dict[str, Any] = json.loads(SNAPSHOT.read_text())
STRUCTS = ("events", "messages", "answers", "records", "generation", "nested")
HOW_TO_RECORD = (
    "if only optional fields at the end, new kinds or new codes were added, run `python -m tests.hive.wire_names`"
)


@pytest.mark.parametrize("section", STRUCTS)
def test_no_struct_of_the_wire_is_renamed_removed_or_laid_out_differently(section: str) -> None:
    found = wire_names()[section]
    for name, recorded in RECORDED[section].items():
        assert name in found, f"{name} is gone from the {section}: logs and other versions still have it"
        for what in ("tag", "layout", "omit_defaults"):
            assert found[name][what] == recorded[what], f"{name}: its {what} must stay as it is"
    assert set(found) == set(RECORDED[section]), f"the {section} have new structs; {HOW_TO_RECORD}"


@pytest.mark.parametrize("section", STRUCTS)
def test_no_field_of_the_wire_is_renamed_removed_moved_or_given_another_default(section: str) -> None:
    found = wire_names()[section]
    for name, recorded in RECORDED[section].items():
        before, now = recorded["fields"], found[name]["fields"]
        assert [each for each in now if each in before] == before, f"{name}: a field changed, moved or is gone"
        added = [each for each in now if each not in before]
        assert all(" = " in each for each in added), f"{name}: a new field needs a default, older logs lack it: {added}"
        if recorded["layout"] == "array":
            assert now[: len(before)] == before, f"{name} is an array: a new field goes to its end"
        assert not added, f"{name} has a new optional field {added}; {HOW_TO_RECORD}"


def test_no_value_of_an_enum_of_the_wire_is_renamed_or_removed() -> None:
    found = wire_names()["enums"]
    for name, recorded in RECORDED["enums"].items():
        assert set(recorded) <= set(found[name]), f"{name} lost a value"
    assert found == RECORDED["enums"], HOW_TO_RECORD


def test_no_error_code_is_renamed_or_removed_or_gets_another_status() -> None:
    found = wire_names()["codes"]
    for code, status in RECORDED["codes"].items():
        assert found.get(code) == status, f"{code} was answered with {status}"
    assert found == RECORDED["codes"], HOW_TO_RECORD


def test_every_event_and_message_that_can_be_written_can_be_read() -> None:
    assert {kind for kind in Event.__subclasses__() if kind.__module__.startswith("bombus.hive.events.")} == set(
        get_args(AnyEvent)
    )
    kinds = {below for kind in Message.__subclasses__() for below in (kind, *kind.__subclasses__())}
    assert {kind for kind in kinds if kind.__module__.startswith("bombus.hive.inbox.")} == set(get_args(AnyMessage))


def test_the_snapshot_has_every_kind_of_struct() -> None:
    assert {section: len(RECORDED[section]) for section in ("events", "messages", "answers")} == {
        "events": 69,
        "messages": 60,
        "answers": 9,
    }
    assert RECORDED["nested"]["CallRef"]["layout"] == "array"
    assert RECORDED["events"]["EpisodeClaimed"]["tag"] == "kind=episode.claimed"
