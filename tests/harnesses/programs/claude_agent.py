"""An agent of claude-agent-sdk: `claude_agent.py TASK`."""

import asyncio
import sys

from claude_agent_sdk import ClaudeAgentOptions, query


async def main(task):
    options = ClaudeAgentOptions(
        model="policy", permission_mode="bypassPermissions", tools=["Bash", "Read", "Edit", "Write"]
    )
    async for message in query(prompt=task, options=options):
        print(message)


asyncio.run(main(sys.argv[1]))
