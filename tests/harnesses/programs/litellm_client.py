"""An agent in a loop around litellm: `litellm_client.py chat|messages whole|streamed TASK`."""

import json
import sys

import litellm
from shell_tool import PARAMETERS, shell

_, dialect, way, task = sys.argv
asked = {
    "model": {"chat": "openai/policy", "messages": "anthropic/policy"}[dialect],
    "tools": [
        {"type": "function", "function": {"name": "shell", "description": "Run a command.", "parameters": PARAMETERS}}
    ],
    "num_retries": 2,
}
messages = [{"role": "system", "content": "Use your tool."}, {"role": "user", "content": task}]
while True:
    answer = litellm.completion(messages=messages, stream=way == "streamed", **asked)
    if way == "streamed":
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = shell(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
