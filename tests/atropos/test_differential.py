"""Atropos's own server beside our queue, driven with the same requests; and the comparison itself.

Its server needs an environment of its own with `atroposlib` 0.4.0, fastapi and uvicorn: `.venv-atropos`, or the Python
that BOMBUS_ATROPOS_PYTHON names. BOMBUS_ATROPOS_SEQUENCES is how many sequences are sent.
"""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.atropos import adapter
from tests.atropos.differences import BATCH, DIFFERENCES, PUSH, STANDING, STATUS, Why
from tests.atropos.differential import compare
from tests.atropos.run_api import run_api

ROOT = Path(__file__).parent.parent.parent
PYTHON = Path(os.environ.get("BOMBUS_ATROPOS_PYTHON", ROOT / ".venv-atropos/bin/python"))
SEQUENCES = int(os.environ.get("BOMBUS_ATROPOS_SEQUENCES", "60"))


@pytest.fixture(scope="module")
def atropos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Run Atropos's own server, unmodified, on a socket that accepts before it is up."""
    if not PYTHON.exists():
        pytest.skip(f"needs Atropos's server: {PYTHON} does not exist")
    with socket.create_server(("127.0.0.1", 0)) as bound, (tmp_path_factory.mktemp("atropos") / "log").open("w") as log:
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # uvicorn takes it for a socket of another family
        command = [str(PYTHON), "-m", "uvicorn", "atroposlib.api.server:app", "--no-access-log"]
        descriptor = bound.fileno()
        with subprocess.Popen([*command, f"--fd={descriptor}"], pass_fds=[descriptor], stderr=log) as server:
            with httpx.Client(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}", timeout=60) as client:
                yield client
            server.terminate()


@pytest.fixture(scope="module")
def hive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with run_api(tmp_path_factory.mktemp("hive")) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_every_difference_to_atropos_is_one_on_the_list(atropos: httpx.Client) -> None:
    with adapter.client() as ours:
        found = compare(ours, atropos, range(SEQUENCES))
    assert not found.unexplained, found.unexplained[0]
    assert found.answers > 10 * SEQUENCES
    if SEQUENCES >= 1_000:
        assert set(found.explained) == set(DIFFERENCES), "a difference that does not come up any more"


def test_every_difference_of_a_whole_hive_is_one_on_the_list_too(atropos: httpx.Client, hive: httpx.Client) -> None:
    found = compare(hive, atropos, range(SEQUENCES))
    assert not found.unexplained, found.unexplained[0]
    assert found.answers > 10 * SEQUENCES


def test_a_whole_hive_answers_as_its_queue_does(hive: httpx.Client) -> None:
    with adapter.client() as queue:
        found = compare(hive, queue, range(10_000, 10_020))
    assert not found.unexplained, found.unexplained[0]
    assert not found.explained
    assert found.answers > 200


def test_a_server_like_ours_differs_in_nothing() -> None:
    with adapter.client() as ours, adapter.client() as theirs:
        found = compare(ours, theirs, range(60))
    assert not found.unexplained
    assert not found.explained
    assert found.answers > 600


class Forgetful(adapter.QueueTransport):
    """Counts one group too few in its status."""

    def status(self, _: object) -> adapter.Answer:
        told = super().status(_)
        return {**told, "queue_size": max(0, told["queue_size"] - 1)}


def test_an_answer_that_nothing_explains_is_found_with_its_seed() -> None:
    with adapter.client() as ours, httpx.Client(transport=Forgetful(), base_url="http://queue.test") as theirs:
        found = compare(ours, theirs, range(20))
    assert found.unexplained
    assert found.unexplained[0].startswith("seed ")
    assert "GET /status" in found.unexplained[0]


def test_each_reason_has_a_difference_and_covers_routes_of_the_contract() -> None:
    assert set(DIFFERENCES) == set(Why)
    for difference in DIFFERENCES.values():
        assert difference.covers
        assert difference.covers <= {BATCH, STATUS, STANDING, PUSH}
