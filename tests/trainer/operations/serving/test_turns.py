"""Whose turn it is, and which operation of a model comes next."""

from bombus.hive.operations.state import ClientModel, Queued
from bombus_trainer.operations.serving.turns import Turns, first_waiting


def model(name: str, *arrivals: int, done: int = 0) -> ClientModel:
    """Return a model with operations that arrived in this order among all, the first of them `done`."""
    found = ClientModel(name=name, session="s", base="b", run=1, opened_ns=0, waiting=len(arrivals) - done)
    for number, arrival in enumerate(arrivals, 1):
        queued = Queued(number=number, arrival=arrival, key=str(number), op="x", accepted_ns=0)
        queued.completed_ns = 1 if number <= done else 0
        found.operations[queued.key] = queued
    return found


def taken(turns: Turns, *models: ClientModel) -> list[tuple[str, int]]:
    """Take all turns, and execute what they say."""
    order = []
    while (found := turns.take(models)) is not None:
        chosen, queued = found
        order.append((chosen.name, queued.number))
        queued.completed_ns, chosen.waiting = 1, chosen.waiting - 1
    return order


def test_models_take_turns_and_each_one_s_operations_keep_their_order() -> None:
    order = taken(Turns(), model("a", 1, 2, 3, 4), model("b", 5, 6))
    assert order == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("a", 4)]


def test_of_models_that_had_no_turn_the_one_whose_operation_has_waited_longest_begins() -> None:
    assert [name for name, _ in taken(Turns(), model("a", 9), model("b", 3), model("c", 7))] == ["b", "c", "a"]


def test_a_model_that_comes_back_after_a_while_does_not_catch_up_on_turns() -> None:
    turns, busy = Turns(), model("busy", *range(1, 11))
    quick = model("quick", 20)
    assert taken(turns, model("quick", 0)) == [("quick", 1)]
    busy.waiting = 10
    assert [name for name, _ in taken(turns, busy, quick)][:3] == ["busy", "quick", "busy"]


def test_clients_that_send_one_operation_at_a_time_do_not_keep_a_queue_from_its_turns() -> None:
    turns, queue = Turns(), model("queue", *range(1, 6))
    order = []
    for arrival in range(10, 16):
        even = arrival % 2 == 0
        found = turns.take([queue, model("even", *[arrival] * even), model("odd", *[arrival] * (not even))])
        assert found is not None
        order.append(found[0].name)
        if found[0] is queue:
            found[1].completed_ns, queue.waiting = 1, queue.waiting - 1
    assert order == ["queue", "odd", "even", "queue", "even", "odd"]


def test_nothing_is_next_where_nothing_waits() -> None:
    assert Turns().take([model("a"), model("b", 1, done=1)]) is None
    assert first_waiting(model("b", 1, 2, done=1)) is not None
    assert first_waiting(model("b", 1, done=1)) is None
