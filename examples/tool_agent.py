"""Teach a model to use a calculator: several turns, OpenAI's tools, a reward for the call and one for the answer.

The default model is smollm2, which writes a call now and then. `tiny` has a token for each character, and never does.
"""

import json
import random
from typing import Any

from common import arguments, job, run
from openai import OpenAI

from bombus import Credentials, SwarmClient, Task, WorkflowOutput

NUM_REPEAT, TURNS = 4, 3
OPENAI = OpenAI(api_key="each episode has its own")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "multiply", "description": "The product of a and b.", "parameters": PARAMETERS}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}


def multiply(arguments_json: str) -> str:
    try:
        values = json.loads(arguments_json)
        return str(values["a"] * values["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!r}"


def agent(task: Task, credentials: Credentials) -> WorkflowOutput:
    """Run one episode. Each turn extends the one before, so all turns become one training sequence."""
    model = OPENAI.with_options(base_url=credentials.base_url, api_key=credentials.api_key)
    messages: list[Any] = [{"role": "user", "content": task.main_query}]
    for _ in range(TURNS):
        reply = model.chat.completions.create(model=credentials.model, messages=messages, tools=[TOOL], max_tokens=64)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": multiply(call.function.arguments)})
    used = any(message["role"] == "tool" for message in messages)
    right = task.metadata["answer"] in (message.content or "")
    return WorkflowOutput(reward=0.5 * used + 0.5 * right, is_success=right, log_metrics={"used_tool": float(used)})


def main() -> None:
    options = arguments(__doc__ or "", model="smollm2")
    with SwarmClient(options.url) as client:
        client.auto_sync_train_config_and_start_engine(job(options.model, 1, NUM_REPEAT, tools="hermes"))
        for step in range(options.steps):
            a, b = random.randint(2, 9), random.randint(2, 9)
            task = Task(task_id=f"{a}*{b}", main_query=f"What is {a} times {b}?", metadata={"answer": str(a * b)})
            rewards = [output.reward for output in client.run_group(task, agent, NUM_REPEAT) if output]
            print(f"step {step}: {task.main_query} rewards {rewards}")


if __name__ == "__main__":
    run(main)
