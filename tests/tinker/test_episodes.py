"""Episodes that agents play train a model of Tinker's SDK: begun with our SDK, played through OpenAI's API."""

import os
import subprocess
import sys
from collections.abc import Iterator
from statistics import mean
from typing import Any

import httpx
import pytest

from bombus import Credentials, EpisodeDatum, SwarmClient, Task
from tests.tinker.test_hive import ROOT, learn, made, step
from tests.tinker.whole_hive import PYTHON, Hive

pytestmark = pytest.mark.skipif(not PYTHON, reason="BOMBUS_PYTHON names the environment of the hive: make test-tinker")


@pytest.fixture
def swarm(hive: Hive) -> Iterator[SwarmClient]:
    with SwarmClient(hive.url) as client:
        yield client


def agent(task: Task, credentials: Credentials) -> float:
    """Ask twice, in one conversation. The reward is the number of characters that were said."""
    messages = [{"role": "user", "content": task.main_query}]
    for _ in range(2):
        answer = httpx.post(
            f"{credentials.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {credentials.api_key}"},
            json={"model": credentials.model, "messages": messages, "max_tokens": 6},
            timeout=120,
        )
        text = answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    return float(sum(len(message["content"]) for message in messages[1::2]))


def differences(model: Any, data: list[EpisodeDatum]) -> list[float]:
    """Return by how much the trainer's logprobs are others than the sampler's, of each token that counts."""
    scored = model.forward([datum.to_tinker() for datum in data], "importance_sampling").result()
    return [
        abs(ours - theirs)
        for datum, output in zip(data, scored.loss_fn_outputs, strict=True)
        for ours, theirs, counts in zip(output["logprobs"].data, datum.logprobs, datum.mask, strict=True)
        if counts
    ]


def test_the_example_of_an_agent_earns_more_and_more(hive: Hive) -> None:
    command = [sys.executable, str(ROOT / "examples/tinker_agent.py")]
    environment = {**os.environ, "TINKER_BASE_URL": hive.url, "TINKER_TELEMETRY": "0"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=True).stdout
    rewards = [float(line.split()[3]) for line in said.splitlines()]
    assert len(rewards) == 10
    assert mean(rewards[-3:]) > 1.5 * rewards[0], rewards


def test_the_data_of_episodes_have_the_logprobs_of_what_they_were_played_with(service: Any, swarm: SwarmClient) -> None:
    model = made(service, rank=8, seed=20)
    learn(model, 2)
    path = model.save_weights_for_sampler("two").result().path
    outputs = swarm.run_group(Task(task_id="t", main_query="hello"), agent, 4, sampler=path)
    data = swarm.take_datums()
    assert {datum.sampler for datum in data} == {path}
    assert len({datum.episode for datum in data}) == len(outputs) == 4
    found = differences(model, data)
    assert found
    assert max(found) < 1e-3, "trainer and sampler are one policy"
    model.forward_backward([datum.to_tinker() for datum in data], "importance_sampling").result()
    step(model).result()
    assert max(differences(model, data)) > 1e-3
    swarm.run_group(Task(task_id="u", main_query="hello"), agent, 2, sampler=path)
    again = swarm.take_datums()
    assert max(differences(model, again)) > 1e-3, "the snapshot has not changed with the model"


def test_a_gateway_that_is_killed_loses_no_ended_episode(hive: Hive, service: Any, swarm: SwarmClient) -> None:
    model = made(service, rank=4, seed=21)
    path = model.save_weights_for_sampler("kept").result().path
    swarm.run_group(Task(task_id="t", main_query="hello"), agent, 2, sampler=path)
    hive.kill("gateway")
    data = swarm.take_datums()
    assert len({datum.episode for datum in data}) == 2
    assert max(differences(model, data)) < 1e-3
