"""Train two models together: a planner tells a worker how to add two numbers, and both learn from the answer.

bombus up --config examples/server/planner_worker.yaml &
python examples/planner_worker.py --steps 20
"""

import random

from common import arguments, job, run
from openai import OpenAI

from bombus import Credentials, MultiModelEpisode, SwarmClient, Task
from bombus.sdk.client import start_engines

BATCH_SIZE, NUM_REPEAT = 2, 4
ENGINES = {"planner": "planner", "worker": "worker"}  # of each role; a hive may have others besides
OPENAI = OpenAI(api_key="each episode has its own")  # one pool of connections for all of them


def question() -> Task:
    a, b = random.randint(0, 9), random.randint(0, 9)
    return Task(task_id=f"{a}+{b}", main_query=f"{a} plus {b} =", metadata={"answer": str(a + b)})


def ask(credentials: Credentials, system: str, text: str) -> str:
    model = OPENAI.with_options(base_url=credentials.base_url, api_key=credentials.api_key)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    reply = model.chat.completions.create(model=credentials.model, messages=messages, max_tokens=4)
    return (reply.choices[0].message.content or "").strip()


def play(task: Task, episode: MultiModelEpisode) -> dict[str, float]:
    """Play an episode of each engine. They are ended together, with a reward for each role."""
    plan = ask(episode["planner"], "name the numbers.", task.main_query)
    answer = ask(episode["worker"], f"reply with the answer only. {plan}", task.main_query)
    right = answer == task.metadata["answer"]
    return {role: 0.3 * digits(text) + 0.7 * right for role, text in (("planner", plan), ("worker", answer))}


def digits(text: str) -> float:
    return sum(char.isdigit() for char in text) / max(1, len(text))


def main() -> None:
    options = arguments(__doc__ or "")
    with SwarmClient(options.url, engine="planner") as client, SwarmClient(options.url, engine="worker") as other:
        start_engines([(each, job(options.model, BATCH_SIZE, NUM_REPEAT)) for each in (client, other)])
        for step in range(options.steps):
            tasks = list({task.task_id: task for task in (question() for _ in range(50))}.values())[:BATCH_SIZE]
            groups = client.run_episodes_until_all_complete(
                tasks, lambda task: client.run_multi_model_group(task, play, NUM_REPEAT, ENGINES)
            )
            played = [rewards for group in groups for rewards in group or () if rewards]
            means = {role: sum(rewards[role] for rewards in played) / len(played) for role in ENGINES}
            print(f"step {step}: " + ", ".join(f"{role} {mean:.3f}" for role, mean in means.items()))


if __name__ == "__main__":
    run(main)
