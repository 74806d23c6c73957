"""An agent of smolagents: `smolagents_agent.py ToolCallingAgent|CodeAgent URL KEY TASK`."""

import sys

import smolagents
from shell_tool import shell

_, kind, url, key, task = sys.argv
model = smolagents.OpenAIModel(model_id="policy", api_base=url, api_key=key)
agent = getattr(smolagents, kind)(tools=[smolagents.tool(shell)], model=model, max_steps=8)
print(agent.run(task))
