from openai import OpenAI

from bombus import Job, SwarmClient, Task

job = Job(model="tiny", batch_size=4, num_repeat=8, lr=3e-3, max_model_len=2048)
tasks = [Task(task_id=f"{n}+{n}", main_query=f"{n} plus {n} =") for n in range(1, 5)]
openai = OpenAI(api_key="each episode has its own")


def agent(task, credentials):  # plays one episode and returns its reward: the share of digits in the reply
    model = openai.with_options(base_url=credentials.base_url, api_key=credentials.api_key)
    messages = [{"role": "user", "content": task.main_query}]
    reply = model.chat.completions.create(model=credentials.model, messages=messages, max_tokens=8)
    return sum(char.isdigit() for char in reply.choices[0].message.content or "") / 8


with SwarmClient("http://127.0.0.1:10086", verbose=False) as client:
    client.auto_sync_train_config_and_start_engine(job)
    for step in range(20):  # four tasks with eight episodes each make one optimizer step
        groups = client.run_episodes_until_all_complete(tasks, lambda task: client.run_group(task, agent, 8))
        rewards = [episode.reward for group in groups for episode in group if episode]  # None: the episode was lost
        print(f"step {step}: mean reward {sum(rewards) / len(rewards):.3f}")
