"""Teach a model to add: one question, one answer, one reward. The agent is plain OpenAI SDK code.

bombus up &
python examples/arithmetic_agent.py --model tiny --steps 20
"""

import random

from common import arguments, job, run
from openai import OpenAI

from bombus import Credentials, SwarmClient, Task, WorkflowOutput

BATCH_SIZE, NUM_REPEAT = 4, 8
OPENAI = OpenAI(api_key="each episode has its own")  # one pool of connections for all of them


def question() -> Task:
    a, b = random.randint(0, 9), random.randint(0, 9)
    return Task(task_id=f"{a}+{b}", main_query=f"{a} plus {b} =", metadata={"answer": str(a + b)})


def agent(task: Task, credentials: Credentials) -> WorkflowOutput:
    """Run one episode. All replies of the model are recorded, and trained on once the reward is known."""
    model = OPENAI.with_options(base_url=credentials.base_url, api_key=credentials.api_key)
    reply = model.chat.completions.create(
        model=credentials.model,
        messages=[
            {"role": "system", "content": "reply with the answer only."},
            {"role": "user", "content": task.main_query},
        ],
        max_tokens=4,
    )
    text = (reply.choices[0].message.content or "").strip()
    right = text == task.metadata["answer"]
    digits = sum(char.isdigit() for char in text) / max(1, len(text))
    return WorkflowOutput(reward=0.3 * digits + 0.7 * right, is_success=right)


def main() -> None:
    options = arguments(__doc__ or "")
    with SwarmClient(options.url) as client:
        client.auto_sync_train_config_and_start_engine(job(options.model, BATCH_SIZE, NUM_REPEAT))
        for step in range(options.steps):
            # A group is claimed and ended in one request each; claims wait while the weights are being updated.
            tasks = list({task.task_id: task for task in (question() for _ in range(50))}.values())[:BATCH_SIZE]
            groups = client.run_episodes_until_all_complete(
                tasks, lambda task: client.run_group(task, agent, NUM_REPEAT)
            )
            rewards = [output.reward for group in groups for output in group or () if output]
            print(f"step {step}: mean reward {sum(rewards) / len(rewards):.3f} of {len(rewards)} episodes")


if __name__ == "__main__":
    run(main)
