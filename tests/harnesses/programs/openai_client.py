"""An agent in a loop around OpenAI's client: `openai_client.py chat|responses whole|streamed TASK`."""

import json
import sys

from openai import OpenAI
from shell_tool import PARAMETERS, shell

client = OpenAI()
FUNCTION = {"name": "shell", "description": "Run a command.", "parameters": PARAMETERS}


def chat(task, streamed):
    messages = [{"role": "system", "content": "Use your tool."}, {"role": "user", "content": task}]
    asked = {"model": "policy", "tools": [{"type": "function", "function": FUNCTION}]}
    while True:
        if streamed:
            with client.chat.completions.stream(messages=messages, **asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(messages=messages, **asked).choices[0].message
        messages.append(message.model_dump(exclude_none=not streamed))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = shell(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(task, streamed):
    items = [{"role": "user", "content": task}]
    asked = {"model": "policy", "instructions": "Use your tool.", "tools": [{"type": "function", **FUNCTION}]}
    while True:
        if streamed:
            with client.responses.stream(input=items, **asked) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(input=items, **asked)
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            result = shell(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


_, dialect, way, task = sys.argv
print({"chat": chat, "responses": responses}[dialect](task, way == "streamed"))
