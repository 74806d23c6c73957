"""The code of Atropos's environments, unmodified, against our wire.

It needs all of atroposlib in an environment of its own, and is skipped without it:

    python -m venv .venv-atropos
    .venv-atropos/bin/pip install atroposlib==0.4.0 'transformers<5' 'datasets<4.6'
"""

import json
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bombus.hive.records import FinishReason
from bombus.hive.trajectories.queue_status import EnvironmentQueueStatus
from bombus.hive.trajectories.records import RolloutGroup
from bombus_gateway.atropos import answers
from bombus_gateway.atropos.answers import JoinAnswer
from bombus_gateway.atropos.batches import write_group
from bombus_gateway.atropos.compression import inflated
from bombus_gateway.atropos.requests import EnvironmentRegistration, read_environment, read_environment_id
from bombus_gateway.atropos.scored_data import read_scored_data, read_scored_data_list
from bombus_gateway.atropos.vllm_generate import ScoredPrompt, is_vllm, read_vllm, write_vllm
from bombus_gateway.operations_wire.generate import read_generate, write_generated
from bombus_gateway.operations_wire.samples import SampledTokens
from tests.gateway.operations_wire.protobuf_bodies import float32s, int32s

ENVIRONMENT = Path(__file__).parents[3] / ".venv-atropos"
pytestmark = pytest.mark.skipif(
    not list(ENVIRONMENT.glob("lib/*/site-packages/transformers")), reason="no whole atroposlib is in .venv-atropos"
)

# Methods of Atropos's classes, with just what they look at of their objects.
PROGRAM = """
import asyncio, json, sys
from functools import partial
from types import SimpleNamespace as Some

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer

url, groups = sys.argv[1], json.loads(sys.stdin.read())
weights = []

async def update_weight(weight):
    weights.append(weight)

config = Some(
    rollout_server_url=url, max_token_length=64, wandb_name="math", inference_weight=1.5, min_batch_allocation=None,
    group_size=2, max_num_workers=-1, max_num_workers_per_node=1,
)
environment = Some(config=config, env_id=3, server=Some(servers=[1], update_weight=update_weight))
environment._post_json_with_compression = partial(BaseEnv._post_json_with_compression, environment)
inference = Some(config=Some(base_url=url + "/v1", api_key="k", timeout=30), tokenizer=Some(bos_token_id=0))
inference._normalize_topk_entry = VLLMServer._normalize_topk_entry

async def main():
    told = {"joined": await BaseEnv._register_env(environment)}
    await BaseEnv.get_status(environment)
    told["status"], told["weights"] = environment.status_dict, weights
    for group in groups:
        await BaseEnv._send_scored_data_to_api(environment, group)
    asked = {"model": "m", "input_ids": [1, 2, 3], "n": 2, "max_tokens": 8, "temperature": 0.5, "stop": ["a"]}
    told["vllm"] = await VLLMServer._tokens_and_logprobs_completion_wrapper(inference, **asked)
    told["sglang"] = await SGLangServer._tokens_and_logprobs_completion_wrapper(inference, **asked)
    told["teacher"] = await VLLMServer._get_logprobs_wrapper(inference, model="m", input_ids=[1, 2, 3], top_k=1)
    print(json.dumps(told))

asyncio.run(main())
"""
STATUS = EnvironmentQueueStatus(
    current_step=1, queue_size=2, unallocated_fraction=0.5, self_queue_size=3, max_group_size=4, env_weight=0.25
)
JOINED = JoinAnswer(
    env_id=3, wandb_name="math_0", checkpoint_dir="", starting_step=0, checkpoint_interval=5, num_steps=7
)


class Seen:
    """What the clients have sent."""

    def __init__(self) -> None:
        self.registered: list[EnvironmentRegistration] = []
        self.named: list[int] = []
        self.encodings: list[str] = []
        self.groups: list[RolloutGroup] = []


class Handler(BaseHTTPRequestHandler):
    """A server of the wire alone: it keeps what it reads, and has two samples for whoever asks."""

    def __init__(self, seen: Seen, *args: Any) -> None:
        self._seen = seen
        super().__init__(*args)

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        encoding = self.headers.get("content-encoding", "")
        body = inflated(encoding, self.rfile.read(int(self.headers.get("content-length", 0))))
        answer = self._answer(body, encoding)
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _answer(self, body: bytes, encoding: str) -> bytes:
        seen = self._seen
        if self.path == "/register-env":
            seen.registered.append(read_environment(body))
            return answers.write_joined(JOINED)
        if self.path == "/status-env":
            seen.named.append(read_environment_id(body))
            return answers.write_environment_status(STATUS)
        if self.path == "/scored_data":
            seen.encodings.append(encoding)
            seen.groups.append(read_scored_data(body))
            return answers.write_pushed(None)
        if self.path == "/scored_data_list":
            seen.encodings.append(encoding)
            seen.groups.extend(read_scored_data_list(body))
            return answers.write_pushed_list([None])
        assert self.path == "/generate"
        return generated(body)


def generated(body: bytes) -> bytes:
    samples = [
        SampledTokens(tokens=int32s(5, 6), logprobs=float32s(-1.0, -2.0), finish=FinishReason.STOP),
        SampledTokens(tokens=int32s(7), logprobs=float32s(-0.5), finish=FinishReason.LENGTH),
    ]
    if not is_vllm(json.loads(body)):
        given = read_generate(body)
        return json.dumps(write_generated(samples[: given.asked.samples], ["a", "b"], 3, given.logprobs)).encode()
    request = read_vllm(body)
    prompt = ScoredPrompt("Hi", float32s(float("nan"), -1.0, -2.0), [(), [(2, -1.0)], [(9, -0.5)]])
    return write_vllm(request, samples[: request.asked.samples], ["a", "b"][: request.asked.samples], prompt)


@pytest.fixture
def served() -> Iterator[tuple[str, Seen]]:
    seen = Seen()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, seen)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


def test_environments_join_push_and_sample(served: tuple[str, Seen]) -> None:
    url, seen = served
    small = {"tokens": [[5, 6], [7]], "masks": [[-100, 6], [7]], "scores": [1.0, 0.0]}
    large = {"tokens": [[*range(400)]] * 2, "masks": [[1] * 400] * 2, "scores": [0.25, 0.5]}
    run = subprocess.run(
        [str(ENVIRONMENT / "bin/python"), "-c", PROGRAM, url],
        input=json.dumps([small, [large, small]]),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ENVIRONMENT,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert seen.registered == [
        EnvironmentRegistration(max_token_length=64, desired_name="math", weight=1.5, group_size=2)
    ]
    assert told["joined"]["status"] == "success"
    assert (seen.named, told["status"]["queue_size"], told["weights"]) == ([3], 2, [0.25])
    assert seen.encodings == ["", "gzip"]
    pushed = [json.loads(write_group(group)) for group in seen.groups]
    assert [group["env_id"] for group in pushed] == [3, 3, 3]
    assert [{name: group[name] for name in small} for group in pushed] == [small, large, small]
    sampled = [[1, 2, 3], [[5, 6], [7]], [[-1.0, -2.0], [-0.5]], ["stop", "length"]]
    assert told["vllm"] == sampled
    assert told["sglang"] == sampled
    assert told["teacher"] == {
        "prompt_tokens": [1, 2, 3],
        "prompt_topk_token_ids": [[], [2], [3, 9]],
        "prompt_topk_logprobs": [[], [-1.0], [-2.0, -0.5]],
    }
