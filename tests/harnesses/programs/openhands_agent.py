"""An agent of OpenHands' SDK with its default tools: `openhands_agent.py URL KEY TASK`."""

import os
import sys

from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent
from pydantic import SecretStr

_, url, key, task = sys.argv
agent = get_default_agent(llm=LLM(model="openai/policy", base_url=url, api_key=SecretStr(key)), cli_mode=True)
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(task)
conversation.run()
