"""An agent of openai-agents: `openai_agents_agent.py chat|responses whole|streamed TASK`."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api
from shell_tool import shell

_, dialect, way, task = sys.argv
set_default_openai_api("chat_completions" if dialect == "chat" else "responses")
agent = Agent(name="worker", model="policy", instructions="Use your tool.", tools=[function_tool(shell)])


async def streamed():
    result = Runner.run_streamed(agent, task)
    async for _ in result.stream_events():
        pass
    return result


print((asyncio.run(streamed()) if way == "streamed" else Runner.run_sync(agent, task)).final_output)
