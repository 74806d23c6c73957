"""An agent in a loop around Anthropic's client: `anthropic_client.py messages whole|streamed TASK`."""

import sys

from anthropic import Anthropic
from shell_tool import PARAMETERS, shell

client = Anthropic()
_, _, way, task = sys.argv
asked = {
    "model": "policy",
    "max_tokens": 1000,
    "system": "Use your tool.",
    "tools": [{"name": "shell", "description": "Run a command.", "input_schema": PARAMETERS}],
}
messages = [{"role": "user", "content": task}]
while True:
    if way == "streamed":
        with client.messages.stream(messages=messages, **asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(messages=messages, **asked)
    messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
    calls = [block for block in message.content if block.type == "tool_use"]
    if not calls:
        break
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": shell(**call.input)} for call in calls]
    messages.append({"role": "user", "content": results})
print(message.content[-1].text)
