"""The program that the pages of docs/deploy.md run against a hive: `tiny` learns to answer in digits."""

from openai import OpenAI

from bombus import Credentials, Job, SwarmClient, Task

JOB = Job(model="tiny", batch_size=4, num_repeat=8, lr=3e-3, max_model_len=2048)
TASKS = [Task(task_id=f"{number}+{number}", main_query=f"{number} plus {number} =") for number in range(1, 5)]


def train(url: str, steps: int) -> list[float]:
    """Train a number of steps, and return the mean reward of each."""
    openai = OpenAI(api_key="each episode has its own")
    means = []

    def agent(task: Task, credentials: Credentials) -> float:
        model = openai.with_options(base_url=credentials.base_url, api_key=credentials.api_key)
        reply = model.chat.completions.create(
            model=credentials.model, messages=[{"role": "user", "content": task.main_query}], max_tokens=8
        )
        return sum(char.isdigit() for char in reply.choices[0].message.content or "") / 8

    with SwarmClient(url, verbose=False) as client:
        client.auto_sync_train_config_and_start_engine(JOB)
        for _ in range(steps):
            groups = client.run_episodes_until_all_complete(TASKS, lambda task: client.run_group(task, agent, 8))
            rewards = [float(str(episode.reward)) for group in groups for episode in group or () if episode]
            means.append(sum(rewards) / len(rewards))
    return means
