"""An agent of pydantic-ai: `pydantic_ai_agent.py chat|responses|messages whole|streamed TASK`."""

import asyncio
import sys

from pydantic_ai import Agent
from shell_tool import shell

_, dialect, way, task = sys.argv
MODELS = {"chat": "openai-chat:policy", "responses": "openai:policy", "messages": "anthropic:policy"}
agent = Agent(MODELS[dialect], instructions="Use your tool.", tools=[shell])


async def streamed():
    async with agent.iter(task) as run:
        async for node in run:
            if Agent.is_model_request_node(node):
                async with node.stream(run.ctx) as stream:
                    async for _ in stream:
                        pass
    return run.result


print((asyncio.run(streamed()) if way == "streamed" else agent.run_sync(task)).output)
