from openai import OpenAI

from bombus import Job, SwarmClient, Task, WorkflowOutput

job = Job(model="smollm2", batch_size=4, num_repeat=8, lr=1e-4, lora_rank=16, lora_load_format="safetensors")
tasks = [Task(task_id=word, main_query=f"Spell {word} backwards.") for word in ("bee", "wax", "hive", "comb")]


def agent(task, credentials):
    model = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key)
    messages = [{"role": "user", "content": task.main_query}]
    reply = model.chat.completions.create(model=credentials.model, messages=messages, max_tokens=12)
    said = reply.choices[0].message.content or ""
    return WorkflowOutput(reward=float(task.task_id[::-1] in said))


with SwarmClient("http://127.0.0.1:10086") as client:
    client.auto_sync_train_config_and_start_engine(job)
    for _ in range(10):
        client.run_episodes_until_all_complete(tasks, lambda task: client.run_group(task, agent, 8))
