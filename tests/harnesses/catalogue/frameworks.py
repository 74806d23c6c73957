"""Agents that are libraries: each is driven by a small program in `programs/`."""

from tests.harnesses.catalogue.harness import Dialect, Harness

BOTH = ("whole", "streamed")
OPENAI = {"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "$key", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
ANTHROPIC = {"ANTHROPIC_BASE_URL": "$url", "ANTHROPIC_API_KEY": "$key"}
VARIABLES = {Dialect.CHAT: OPENAI, Dialect.RESPONSES: OPENAI, Dialect.MESSAGES: ANTHROPIC}
POINTED = {
    Dialect.CHAT: "`OPENAI_BASE_URL` or `base_url=`",
    Dialect.RESPONSES: "`OPENAI_BASE_URL` or `base_url=`",
    Dialect.MESSAGES: "`ANTHROPIC_BASE_URL`, without `/v1`",
}


def framework(name: str, package: str, program: str, dialect: Dialect) -> Harness:
    """Return a library that has its own environment's Python run a program with the dialect and the way."""
    return Harness(
        name=name,
        package=package,
        environment="frameworks",
        dialect=dialect,
        command=("$bin/python", f"$programs/{program}.py", dialect, "$way", "$task"),
        variables=VARIABLES[dialect],
        ways=BOTH,
        pointed=POINTED[dialect],
        marks_retries=True,
        own_retries=False,
    )


def smolagents(kind: str, sequences: int = 1, because: str = "") -> Harness:
    return Harness(
        name=f"smolagents {kind}",
        package="smolagents",
        environment="smolagents",
        dialect=Dialect.CHAT,
        command=("$bin/python", "$programs/smolagents_agent.py", kind, "$url/v1", "$key", "$task"),
        ways=("whole",),
        sequences=sequences,
        because=because,
        pointed="`OpenAIModel(api_base=, api_key=)`",
        marks_retries=True,
        own_retries=False,
    )


FRAMEWORKS = (
    *(framework("LangGraph", "langgraph", "langgraph_agent", dialect) for dialect in Dialect),
    *(
        framework("openai-agents", "openai-agents", "openai_agents_agent", dialect)
        for dialect in (Dialect.CHAT, Dialect.RESPONSES)
    ),
    *(framework("pydantic-ai", "pydantic-ai-slim", "pydantic_ai_agent", dialect) for dialect in Dialect),
    smolagents("ToolCallingAgent", 5, "calls and results come back as text that differs from what was sampled"),
    smolagents("CodeAgent"),
    Harness(
        name="openhands-sdk",
        package="openhands-sdk",
        environment="openhands",
        dialect=Dialect.CHAT,
        command=("$bin/python", "$programs/openhands_agent.py", "$url/v1", "$key", "$task"),
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"},
        ways=("whole",),
        pointed='`LLM(model="openai/policy", base_url=, api_key=)`',
    ),
    Harness(
        name="claude-agent-sdk",
        package="claude-agent-sdk",
        environment="claude-agent",
        dialect=Dialect.MESSAGES,
        command=("$bin/python", "$programs/claude_agent.py", "$task"),
        variables={
            **ANTHROPIC,
            "IS_SANDBOX": "1",
            "ENABLE_TOOL_SEARCH": "false",
            "DISABLE_PROMPT_CACHING": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        own_retries=False,
        pointed="`ANTHROPIC_BASE_URL`, without `/v1`",
    ),
)
