"""Atropos's own server and our wire, given the same requests.

It needs atroposlib 0.4.0 in an environment of its own, and is skipped without it:

    python -m venv .venv-atropos
    .venv-atropos/bin/pip install --no-deps atroposlib==0.4.0
    .venv-atropos/bin/pip install fastapi uvicorn
"""

import gzip
import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bombus.errors import Refused
from bombus.hive.trajectories.queue_status import EnvironmentQueueStatus
from bombus_gateway.atropos import answers
from bombus_gateway.atropos.answers import JoinAnswer
from bombus_gateway.atropos.batches import NO_BATCH, write_batch, write_group, write_latest
from bombus_gateway.atropos.compression import inflated
from bombus_gateway.atropos.refusals import write_refusal
from bombus_gateway.atropos.scored_data import read_scored_data, read_scored_data_list
from tests.gateway.atropos.groups import random_group

PYTHON = Path(__file__).parents[3] / ".venv-atropos/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="atroposlib is not in .venv-atropos")

TRAINER = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 4,
    "max_token_len": 64,
    "checkpoint_dir": "c",
    "save_checkpoint_interval": 5,
    "starting_step": 0,
    "num_steps": 7,
}


@contextmanager
def atropos() -> Iterator[httpx.Client]:
    """Run a server that nothing was sent to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(PYTHON), "-m", "uvicorn", "atroposlib.api.server:app", "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen(command)
    try:
        until_it_listens = httpx.HTTPTransport(retries=7)  # with pauses that double, a minute in all
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=until_it_listens, timeout=30) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with atropos() as client:
        yield client


def exact(text: bytes) -> str:
    """Return JSON in one form in which 1 and 1.0 differ."""
    return json.dumps(json.loads(text), sort_keys=True)


def test_a_group_comes_back_with_the_values_that_atropos_gives_back(server: httpx.Client) -> None:
    for seed in range(300):
        body = json.dumps(random_group(seed)).encode()
        packed = gzip.compress(body)
        answer = server.post(
            "/scored_data", content=packed, headers={"content-encoding": "gzip", "content-type": "application/json"}
        )
        assert answer.content == answers.write_pushed(None)
        theirs = server.get("/latest_example").content
        assert exact(write_group(read_scored_data(inflated("gzip", packed)))) == exact(theirs), f"seed {seed}"


def test_a_batch_is_the_one_that_atropos_gives(server: httpx.Client) -> None:
    server.get("/reset_data")
    server.post("/register", json=TRAINER)
    groups = [{"tokens": [[1, 2], [3]], "masks": [[1, 2], [3]], "scores": [1, 0.5]}, random_group(3)]
    groups[1] |= {name: groups[1][name][:1] * 2 for name in ("tokens", "masks", "scores")}
    groups[1] |= dict.fromkeys(groups[1].keys() - {"tokens", "masks", "scores", "images"})
    body = json.dumps(groups).encode()
    answer = server.post("/scored_data_list", content=body, headers={"content-type": "application/json"})
    assert exact(answer.content) == exact(answers.write_pushed_list([None, None]))
    assert exact(b"".join(write_batch(read_scored_data_list(body)))) == exact(server.get("/batch").content)
    assert exact(server.get("/batch").content) == exact(NO_BATCH)


def test_small_answers_have_the_fields_of_those_that_atropos_gives(server: httpx.Client) -> None:
    server.get("/reset_data")
    server.post("/register", json=TRAINER)
    joining = {"max_token_length": 64, "desired_name": "math", "weight": 1.0, "group_size": 2}
    assert server.post("/register-env", json=joining).content == answers.WAIT_FOR_TRAINER
    server.get("/batch")
    joined = JoinAnswer(
        env_id=0, wandb_name="math_0", checkpoint_dir="c", starting_step=0, checkpoint_interval=5, num_steps=7
    )
    assert server.post("/register-env", json=joining).content == answers.write_joined(joined)
    status = EnvironmentQueueStatus(
        current_step=0, queue_size=0, unallocated_fraction=1.0, self_queue_size=0, max_group_size=1, env_weight=1.0
    )
    theirs = server.request("GET", "/status-env", json={"env_id": 0})
    assert exact(theirs.content) == exact(answers.write_environment_status(status))
    group = {"tokens": [[1]], "masks": [[1]], "scores": [1], "env_id": 0}
    assert server.post("/scored_data", json=group).content == answers.write_pushed(1)
    buffered = answers.write_pushed_list([0])
    assert exact(server.post("/scored_data_list", json=[group]).content) == exact(buffered)
    assert server.get("/info").content == answers.write_info(4, 64)
    assert server.get("/wandb_info").content == answers.write_wandb_info("g", "p")
    assert server.get("/status").content == answers.write_status(0, 2)
    assert server.post("/disconnect-env", json={"env_id": 0}).content == answers.DISCONNECTED
    assert server.post("/disconnect-env", json={"env_id": 9}).json().keys() == {"status", "error"}
    assert server.get("/").json().items() <= json.loads(answers.write_welcome(True)).items()
    assert server.get("/reset_data").content == answers.RESET
    assert server.get("/wandb_info").content == answers.write_wandb_info()


def test_before_anything_was_sent_atropos_says_what_we_say() -> None:
    with atropos() as server:
        assert exact(server.get("/latest_example").content) == exact(write_latest(None))
        ours, theirs = json.loads(answers.NOT_REGISTERED), server.get("/batch").json()
        assert ours.keys() == theirs.keys()
        assert (ours["status"], ours["batch"]) == (theirs["status"], theirs["batch"])
        assert server.get("/status").content == answers.write_status()
        assert server.get("/info").content == answers.write_info()
        assert server.get("/wandb_info").content == answers.write_wandb_info()


GROUP: dict[str, Any] = {"tokens": [[5, 6], [7]], "masks": [[-100, 6], [7]], "scores": [1.0, -0.5]}


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": None},
        {"tokens": [5, 6]},
        {"tokens": [[5, "x"], [7]]},
        {"tokens": [[5, None], [7]]},
        {"tokens": [[5, 6.5], [7]]},
        {"masks": [[5, 6], {}]},
        {"scores": [1.0, None]},
        {"scores": 1.0},
        {"advantages": [1.0, 2.0]},
        {"inference_logprobs": [[1.0, "a"], [1.0]]},
        {"messages": [{"role": "user", "content": ""}, 1]},
        {"generation_params": []},
        {"overrides": {}},
        {"overrides": [{}, 1]},
        {"group_overrides": "a"},
        {"env_id": "x"},
        {"distill_token_ids": [[1, 2], [3]]},
    ],
)
def test_what_atropos_refuses_is_refused_with_the_same_status_and_place(
    server: httpx.Client, change: dict[str, object]
) -> None:
    theirs = server.post("/scored_data", json=GROUP | change)
    with pytest.raises(Refused) as refused:
        read_scored_data(json.dumps(GROUP | change).encode())
    status, ours = write_refusal(refused.value)
    assert status == theirs.status_code == 422
    (detail,) = json.loads(ours)["detail"]
    if change.keys() != {"messages"}:  # of which Atropos names the field alone
        assert detail["loc"] == theirs.json()["detail"][0]["loc"]


@pytest.mark.parametrize("field", GROUP)
def test_a_missing_field_is_told_as_atropos_tells_it(server: httpx.Client, field: str) -> None:
    given = {name: value for name, value in GROUP.items() if name != field}
    (theirs,) = server.post("/scored_data", json=given).json()["detail"]
    with pytest.raises(Refused) as refused:
        read_scored_data(json.dumps(given).encode())
    (ours,) = json.loads(write_refusal(refused.value)[1])["detail"]
    assert (ours["type"], ours["loc"]) == (theirs["type"], theirs["loc"])
