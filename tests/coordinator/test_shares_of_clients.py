"""What training clients have is shared by keys, and who is gone makes room."""

import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import SessionEnd
from bombus.hive.inbox import Accepted, AnyAnswer, Done
from tests.coordinator.core_in_memory import ENGINE
from tests.coordinator.operations_in_memory import OperationHarness, saved
from tests.coordinator.test_suspending import refused

SAVE = "save_weights"


def key(harness: OperationHarness, name: str, **more: object) -> AnyAnswer:
    """Open another session with the key of a name, and return the answer."""
    return harness.open_session(f"{name or 'any'}{len(harness.clients.sessions)}", owner=name, **more)


def newest(harness: OperationHarness) -> str:
    return list(harness.clients.sessions)[-1]


def test_one_keys_sessions_lock_out_neither_another_key_nor_the_admin() -> None:
    harness = OperationHarness()
    harness.limits(sessions_max=4)
    for _ in range(4):
        assert isinstance(key(harness, ""), Done)
    why = refused(key(harness, ""), Code.QUOTA)
    assert why.startswith(f"Engine {ENGINE} has 4 sessions, 4 of them opened with this key")
    assert [isinstance(key(harness, "alice"), Done) for _ in range(3)] == [True, True, False]
    assert isinstance(key(harness, "", admin=True), Done)
    assert harness.clients.sessions[newest(harness)].holder == "/admin"


def test_one_keys_models_leave_another_key_its_share_and_the_setting_travels_with_the_creation() -> None:
    harness = OperationHarness()
    key(harness, "alice")
    mine = newest(harness)
    key(harness, "bob")
    his = newest(harness)

    def created(session: str, count: int) -> list[bool]:
        names = (f"{session}:train:{len(harness.clients.models)}" for _ in range(count))
        made = (
            harness.operate("0", "create_model", name, session=session, base="tiny", models_max=40) for name in names
        )
        return [isinstance(each, Accepted) for each in made]

    assert created(mine, 41) == [True] * 40 + [False], "one session may hold as many as the gateway says"
    assert created(his, 21) == [True] * 20 + [False]


def test_models_of_sessions_that_have_ended_or_fallen_silent_make_room() -> None:
    harness = OperationHarness()
    harness.limits(models_max=2)
    harness.serving()
    harness.open_session("t")
    harness.create("t:train:0", "t")
    harness.done("0", "t:train:0")
    harness.open_session("u")
    why = refused(harness.create("u:train:0", "u"), Code.QUOTA)
    assert "has 2 models, 2 of them made with this key" in why
    assert "--models-max" in why
    harness.close_session("t")
    assert isinstance(harness.create("u:train:0", "u"), Accepted), "those of t are being saved"
    harness.done("0", "u:train:0")
    for _ in range(3):
        harness.touch("u", after_s=50)
    assert harness.clients.sessions["s"].ended is None, "an hour is its client's, unless others need its room"
    assert isinstance(harness.create("u:train:1", "u"), Accepted)
    ended = harness.clients.sessions["s"].ended
    assert ended is not None
    assert (ended.reason, ended.save) == (SessionEnd.IDLE, True)
    assert ended.detail == "it was silent, and other clients needed its room"


def test_one_keys_checkpoints_leave_another_key_its_share() -> None:
    harness = OperationHarness()
    harness.limits(checkpoints_max=4)
    harness.serving()
    for number in range(1, 5):
        harness.operate(str(number), SAVE)
        harness.done(str(number), saved=saved(f"mine-{number}"))
    refused(harness.operate("5", SAVE), Code.QUOTA)
    harness.open_session("b", owner="bob")
    harness.create("b:train:0", "b")
    harness.done("0", "b:train:0")
    for number in range(1, 3):
        assert isinstance(harness.operate(str(number), SAVE, "b:train:0", session="b"), Accepted)
        harness.done(str(number), "b:train:0", saved=saved(f"his-{number}"))
    refused(harness.operate("3", SAVE, "b:train:0", session="b"), Code.QUOTA)


def test_one_keys_bodies_leave_another_key_its_share() -> None:
    harness = OperationHarness()
    harness.limits(bodies_bytes_max=1600)
    harness.serving()
    harness.open_session("b", owner="bob")
    harness.create("b:train:0", "b")  # of 100 bytes, as the other's first body
    harness.operate("1", body=harness.body("large", 1400))
    refused(harness.operate("2", body=harness.body("more", 200)), Code.QUOTA)
    assert isinstance(harness.operate("1", model="b:train:0", session="b", body=harness.body("his", 700)), Accepted)


@pytest.mark.parametrize("owner", ["", "greedy"])
def test_sessions_of_a_client_that_opens_and_ends_many_are_forgotten_before_those_of_others(owner: str) -> None:
    harness = OperationHarness()
    harness.limits(sessions_max=2)
    harness.open_session("mine", owner="alice")
    harness.close_session("mine")
    for number in range(8):
        harness.open_session(f"g{number}", owner=owner)
        harness.close_session(f"g{number}")
    assert "mine" in harness.clients.sessions
    assert len(harness.clients.sessions) == 4


def test_one_keys_endpoints_leave_another_key_its_share() -> None:
    harness = OperationHarness().serving()

    def added(owner: str, count: int) -> int:
        ports = range(1000 + len(harness.clients.endpoints), 1000 + len(harness.clients.endpoints) + count)
        for port in ports:
            add = inbox.AddEndpoint(id=harness.id(), engine=ENGINE, host="gpu", port=port, world_size=1, owner=owner)
            harness.send(add)
        return sum(each.owner == owner for each in harness.clients.endpoints.values())

    assert added("alice", 70) == 64
    assert added("bob", 70) == 32
    assert isinstance(next(iter(harness.clients.endpoints.values())), ev.EndpointAdded)
