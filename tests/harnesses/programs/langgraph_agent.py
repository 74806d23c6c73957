"""LangChain's agent, a graph of LangGraph: `langgraph_agent.py chat|responses|messages whole|streamed TASK`."""

import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from shell_tool import shell

_, dialect, way, task = sys.argv
match dialect:
    case "chat":
        model = ChatOpenAI(model="policy", use_responses_api=False)
    case "responses":
        model = ChatOpenAI(model="policy", use_responses_api=True)
    case _:
        model = ChatAnthropic(model="policy")
agent = create_agent(model, tools=[shell], system_prompt="Use your tool.")
given = {"messages": [{"role": "user", "content": task}]}
if way == "streamed":
    for kind, state in agent.stream(given, stream_mode=["values", "messages"]):
        if kind == "values":
            last = state["messages"][-1]
else:
    last = agent.invoke(given)["messages"][-1]
print(last.text)
