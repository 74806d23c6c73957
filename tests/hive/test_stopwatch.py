"""A stopwatch shows for how long it has run, whatever comes twice or out of order."""

from bombus.hive.operations.stopwatch import Stopwatch


def test_a_stopwatch_counts_while_it_runs_and_goes_on_where_it_stood() -> None:
    watch = Stopwatch()
    assert watch.shows(50) == 0
    watch.run(True, 100)
    assert (watch.shows(100), watch.shows(130)) == (0, 30)
    watch.run(False, 140)
    assert (watch.shows(140), watch.shows(900)) == (40, 40)
    watch.run(True, 1000)
    assert watch.shows(1005) == 45


def test_starting_and_stopping_it_again_changes_nothing() -> None:
    watch = Stopwatch()
    for at_ns in (100, 120):
        watch.run(True, at_ns)
    for at_ns in (140, 160):
        watch.run(False, at_ns)
    assert watch == Stopwatch(ran_ns=40)


def test_a_time_before_its_start_shows_nothing_less() -> None:
    watch = Stopwatch(ran_ns=7)
    watch.run(True, 100)
    assert watch.shows(90) == 7
