"""The kinds of failure: the table, what an event without a kind stands for, and the page that lists them."""

import msgspec
import pytest

from bombus.hive.events import AbortReason, EpisodeAborted, Outcome, decode_event, encode_event
from bombus.hive.failures import FAILURES, FailureKind
from bombus.hive.inbox import Abort, EpisodeResult
from tests.hive import failures_page

BUDGETS = {FailureKind.TIME, FailureKind.TOKENS, FailureKind.TURNS}


def test_each_kind_has_a_row_and_only_budgets_are_trained_on() -> None:
    assert set(FAILURES) == set(FailureKind)
    assert {kind for kind in FailureKind if kind.is_trained} == BUDGETS
    assert {kind for kind in FailureKind if not kind.is_infra} == BUDGETS | {FailureKind.CLIENT}


def test_the_page_has_the_table_of_the_sources() -> None:
    assert failures_page.PAGE.read_text() == failures_page.page(), "run: python -m tests.hive.failures_page"


@pytest.mark.parametrize("reason", AbortReason)
def test_an_abort_of_an_older_log_has_the_kind_of_its_reason(reason: AbortReason) -> None:
    event = EpisodeAborted(engine="main", run=1, episodes=("main-1-1",), reason=reason)
    written = encode_event(event)
    assert b"failure" not in written
    read = decode_event(written)
    assert isinstance(read, EpisodeAborted)
    assert read.failed_by is reason.failure
    assert (read.failed_by is None) == (reason in (AbortReason.CLIENT, AbortReason.MULTI_MODEL))


def test_messages_without_a_kind_are_written_as_before() -> None:
    """Reports of older clients keep their digest, so that one that is sent again still counts once."""
    result = EpisodeResult(episode="main-1-1", task="t1", reward=1.0)
    assert "failure" not in msgspec.msgpack.decode(msgspec.msgpack.encode(result))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=EpisodeResult).failure is None
    abort = Abort(id="a", engine="main", client="c1", episodes=("main-1-1",), infra=True)
    assert "failure" not in msgspec.msgpack.decode(msgspec.msgpack.encode(abort))
    assert Outcome(episode="main-1-1", task="t1", reward=1.0, digest=b"").failure is None
