"""Two clients feed one engine: one adds with our SDK and threads, one counts over plain HTTP with asyncio.

Neither knows about the other. They could just as well be on two machines, in two languages, with other dependencies.
"""

import asyncio
import random
import uuid

import httpx
from arithmetic_agent import NUM_REPEAT, agent, question
from common import arguments, job, run

from bombus import SwarmClient


def adding(url: str, last: int) -> None:
    """Use the SDK: run one group at a time until the engine has made its last step."""
    with SwarmClient(url) as client:
        while client.get_global_step() < last:
            outputs = client.run_group(question(), agent, NUM_REPEAT)
            print(f"adding: {[round(output.reward, 2) for output in outputs if output]}\n", end="")  # in one piece


async def counting(url: str, last: int) -> None:
    """Use no SDK, only three routes and the OpenAI protocol."""
    me = str(uuid.uuid4())

    async def episode(http: httpx.AsyncClient, letter: str) -> float:
        body = {"client_uuid": me, "episode_type": "train", "discard_episode_timeout": 60.0}
        while not (claim := (await http.post("/claim_episode", json=body)).json())["success"]:
            await asyncio.sleep(1)  # `fail_cause` gives the reason: no capacity, or a change of weights
        chat = {"model": "any", "messages": [{"role": "user", "content": f"{letter}="}], "max_tokens": 4}
        key = {"Authorization": f"Bearer {claim['openai_api_key']}"}
        reply = await http.post(f"{claim['openai_base_url']}/chat/completions", json=chat, headers=key)
        text = reply.raise_for_status().json()["choices"][0]["message"]["content"] or ""
        output = {"reward": text.count(letter) / 4, "is_success": text == 4 * letter, "metadata": {}}
        end = {"client_uuid": me, "episode_uuid": claim["episode_uuid"], "task_id": letter, "workflow_output": output}
        (await http.post("/end_episode", json=end)).raise_for_status()
        return float(output["reward"])

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while (await http.get("/get_engine_status")).json()["global_step"] < last:
            letter = random.choice("abcdefgh")
            print(f"counting: {await asyncio.gather(*(episode(http, letter) for _ in range(NUM_REPEAT)))}\n", end="")


async def main() -> None:
    options = arguments(__doc__ or "")
    with SwarmClient(options.url) as client:
        client.auto_sync_train_config_and_start_engine(job(options.model, num_repeat=NUM_REPEAT))
        first = client.get_global_step()  # more than 0 if the engine has trained before
    last = first + options.steps
    print(f"from step {first} to step {last}")
    await asyncio.gather(asyncio.to_thread(adding, options.url, last), counting(options.url, last))


if __name__ == "__main__":
    run(lambda: asyncio.run(main()))
