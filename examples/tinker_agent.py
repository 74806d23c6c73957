"""Train with the tinker SDK on episodes that an agent plays: it knows nothing but OpenAI's API.

Start `bombus up` first; `pip install tinker` here, beside bombus. TINKER_BASE_URL is the hive's address, by default
http://127.0.0.1:10086.
"""

import os
from statistics import mean

import httpx

import tinker
from bombus import Credentials, SwarmClient, Task
from tinker import types

BASE = os.environ.get("BASE_MODEL", "tiny")
ADDRESS = os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:10086")
KEY = os.environ.get("TINKER_API_KEY", "tml-any")
TASKS = [Task(task_id=f"task-{number}", main_query=word) for number, word in enumerate(("bee", "hive"))]


def agent(task: Task, credentials: Credentials) -> float:
    """Talk with the model for two turns. The reward is the share of vowels in what it says."""
    messages = [{"role": "user", "content": task.main_query}]
    said = ""
    for _ in range(2):
        answer = httpx.post(
            f"{credentials.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {credentials.api_key}"},
            json={"model": credentials.model, "messages": messages, "max_tokens": 8},
            timeout=120,
        )
        text = answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        said += text
    return mean(letter in "aeiou" for letter in said) if said else 0.0


def main() -> None:
    service = tinker.ServiceClient(base_url=ADDRESS, api_key=KEY)
    model = service.create_lora_training_client(base_model=BASE, rank=8).result()
    with SwarmClient(ADDRESS, api_key=KEY) as swarm:
        for step in range(10):
            snapshot = model.save_weights_for_sampler(f"step-{step}", ttl_seconds=3600).result().path
            groups = [swarm.run_group(task, agent, 16, sampler=snapshot) for task in TASKS]
            data = swarm.take_datums()
            reward = mean(float(output.reward) for group in groups for output in group if output is not None)
            print(f"step {step}: reward {reward:.3f} of {len(data)} conversations", flush=True)
            scored = model.forward_backward([datum.to_tinker() for datum in data], "importance_sampling")
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            scored.result()
    service.close("success").result()  # its model makes room at once, and no thread of the SDK works while Python exits


if __name__ == "__main__":
    main()
