"""xorl's client, unmodified, puts samplers in sync with what it trains: replicas of a whole hive, and an SGLang server.

The SGLang server is a double over real HTTP whose tokens our own engine draws: it loads the files of a sync and scores
with them.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import xorl_client
from anyio.from_thread import start_blocking_portal
from xorl_client import types

from tests.inference.backends.foreign_servers import KEY, ExternalSglang, Message, Receive, Send, serving
from tests.patience import wait_until
from tests.tinker.test_hive import BASE, ROOT, SENTENCES, settled
from tests.tinker.whole_hive import PYTHON, Hive

pytestmark = pytest.mark.skipif(not PYTHON, reason="BOMBUS_PYTHON names the environment of the hive: make test-tinker")

PROMPT = [5, 6, 7]
EXAMPLE_S = 240.0


class OpenSglang(ExternalSglang):
    """The double without a key: gateways have none for endpoints."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["headers"] = [*scope["headers"], (b"authorization", f"Bearer {KEY}".encode())]
        await super().__call__(scope, receive, send)


@pytest.fixture(scope="module")
def hive_options() -> tuple[str, ...]:
    return ("--inference-host", "127.0.0.1")


@pytest.fixture
def service(hive: Hive) -> Any:
    return xorl_client.ServiceClient(base_url=hive.url, api_key="key")


@contextmanager
def made(service: Any, rank: int = 8, name: str | None = None) -> Iterator[Any]:
    """Create a model, and end it when the block has."""
    model = settled(service.create_lora_training_client(base_model=BASE, rank=rank, model_id=name))
    try:
        yield model
    finally:
        settled(model.unload())


@contextmanager
def sglang(hive: Hive) -> Iterator[tuple[OpenSglang, str]]:
    """Serve the base of the hive at another server."""
    info = httpx.post(f"{hive.url}/api/v1/get_info", json={"model_id": "default"}).json()
    server = OpenSglang(Path(info["model_data"]["tokenizer_id"]))
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving(server)) as url:
        yield server, url


def data() -> list[Any]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        for tokens in SENTENCES
    ]


def learn(model: Any, steps: int = 3) -> None:
    for _ in range(steps):
        settled(model.forward_backward(data(), "causallm_loss"))
        settled(model.optim_step(types.AdamParams(learning_rate=1e-2)))


def forward(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """Return the trainer's logprobs of tokens after a prompt."""
    whole = prompt + tokens
    inputs = {"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)
    (output,) = settled(model.forward([datum], "cross_entropy")).loss_fn_outputs
    return list(output["logprobs"].data)[len(prompt) - 1 :]


def sampled_there(url: str) -> tuple[list[int], list[float], str]:
    """Sample at an SGLang server. Returns tokens, their logprobs, and what the server calls its weights."""
    params = {"n": 1, "max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop_token_ids": []}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 0}
    meta = httpx.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]
    scored = meta["output_token_logprobs"]
    return [token for _, token, _ in scored], [logprob for logprob, _, _ in scored], meta["weight_version"]


def sampled_here(hive: Hive) -> tuple[list[int], list[float]]:
    """Sample at the hive, from what it puts in sync last."""
    sampler = xorl_client.SamplingClient(base_url=hive.url)
    answer = settled(sampler.sample(types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=6)))
    return list(answer.sequences[0].tokens), list(answer.sequences[0].logprobs)


def until_ready(hive: Hive) -> None:
    """Wait for a gateway that comes up: xorl's client does not try everything again."""

    def is_ready() -> bool:
        try:
            return httpx.get(f"{hive.url}/health").status_code == 200
        except httpx.TransportError:  # refused, or reset by the one that was killed
            return False

    wait_until(is_ready)


def test_an_sglang_server_samples_from_the_model_after_a_sync_and_not_before(hive: Hive, service: Any) -> None:
    with made(service) as model, sglang(hive) as (server, url):
        port = int(url.rpartition(":")[2])
        added = settled(model.add_inference_endpoint("127.0.0.1", port))
        assert added.success, added.message
        assert added.endpoint.server_info.version == "sglang"
        learn(model)
        tokens, before, _ = sampled_there(url)
        assert forward(model, PROMPT, tokens) != pytest.approx(before, abs=1e-2)
        synced = settled(model.sync_inference_weights())
        assert synced.success, synced.message
        assert "NCCL was not used" in synced.message
        assert synced.total_bytes > 10_000
        tokens, after, label = sampled_there(url)
        assert forward(model, PROMPT, tokens) == pytest.approx(after, abs=1e-4)
        assert label.startswith("default/synced-")
        hive.kill("gateway")
        until_ready(hive)
        listed = settled(model.list_inference_endpoints())
        assert [(each.port, each.healthy) for each in listed.endpoints] == [(port, True)]
        assert settled(model.remove_inference_endpoint("127.0.0.1", port)).success
        assert server.label == label


def test_the_hives_own_replicas_sample_from_the_model_after_a_sync_and_stay_there_until_the_next(
    hive: Hive, service: Any
) -> None:
    with made(service) as model:
        synced = settled(model.sync_inference_weights())
        assert synced.success, synced.message
        assert "the hive's own replicas" in synced.message
        learn(model)
        tokens, before = sampled_here(hive)
        assert forward(model, PROMPT, tokens) != pytest.approx(before, abs=1e-2)
        assert settled(model.sync_inference_weights()).success
        tokens, after = sampled_here(hive)
        assert forward(model, PROMPT, tokens) == pytest.approx(after, abs=1e-4)
        (own,) = synced.endpoints_synced
        added = settled(model.add_inference_endpoint(own.host, own.port, sync_weights=True))
        assert (added.success, added.weights_synced) == (True, True), added
        assert settled(model.remove_inference_endpoint(own.host, own.port)).success


def test_a_trainer_that_sleeps_and_wakes_up_goes_on_bit_for_bit(hive: Hive, service: Any) -> None:
    with made(service, name="whole") as whole, made(service, name="rested") as rested:
        learn(whole, 2)
        rested.load_state_with_optimizer(settled(whole.save_state("equal")).path).result()
        for model in (whole, rested):
            settled(model.forward_backward(data(), "causallm_loss"))  # the gradient sleeps too
        assert httpx.post(f"{hive.url}/sleep", timeout=60).json()["success"]
        waiting = rested.optim_step(types.AdamParams(learning_rate=1e-2))
        assert "asleep" in settled(rested.sync_inference_weights()).message
        assert httpx.post(f"{hive.url}/wake_up", timeout=60).json()["success"]
        settled(waiting)
        settled(whole.optim_step(types.AdamParams(learning_rate=1e-2)))
        learn(whole, 1)
        learn(rested, 1)
        assert forward(rested, PROMPT, [8, 9, 10]) == forward(whole, PROMPT, [8, 9, 10])


# ---- examples -----------------------------------------------------------------------------------------------------


def said_by(example: str, hive: Hive, **environment: str) -> list[str]:
    command = [sys.executable, str(ROOT / "examples" / example)]
    done = subprocess.run(
        command,
        env={**os.environ, "XORL_BASE_URL": hive.url, **environment},
        capture_output=True,
        text=True,
        timeout=EXAMPLE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_of_supervised_training_learns(hive: Hive) -> None:
    *steps, saved = said_by("xorl_sft.py", hive)
    losses = [float(line.split()[3]) for line in steps]
    assert len(losses) == 9
    assert losses[-1] < 0.75 * losses[0], losses  # an adapter learns little on a base of random weights
    assert saved == "saved as xorl://sft/weights/bees"


def test_the_example_that_puts_replicas_in_sync_earns_more_and_more(hive: Hive) -> None:
    rewards = [float(line.split()[3]) for line in said_by("xorl_rl.py", hive)]
    assert len(rewards) == 16
    assert rewards[-1] > 1.5 * rewards[0], rewards


def test_the_example_with_a_reference_stays_near_it_and_earns_more(hive: Hive) -> None:
    lines = [line.split() for line in said_by("xorl_reference.py", hive)]
    rewards, nats = [float(line[3].rstrip(",")) for line in lines], [float(line[4]) for line in lines]
    assert len(lines) == 10
    assert rewards[-1] > rewards[0], rewards
    assert abs(nats[0]) < 0.01, "both begin as the base"
    assert nats[-1] > nats[0]
