"""The clients of the dialects, with a loop of tools around them that is a small program in `programs/`."""

from dataclasses import replace

from tests.harnesses.catalogue.frameworks import framework
from tests.harnesses.catalogue.harness import Dialect, Harness

CLIENTS: tuple[Harness, ...] = (
    replace(framework("openai client", "openai", "openai_client", Dialect.CHAT), own_retries=True),
    replace(framework("openai client", "openai", "openai_client", Dialect.RESPONSES), own_retries=True),
    replace(framework("anthropic client", "anthropic", "anthropic_client", Dialect.MESSAGES), own_retries=True),
    *(
        replace(
            framework("litellm client", "litellm", "litellm_client", dialect),
            environment="mini",
            marks_retries=dialect == Dialect.CHAT,
            own_retries=True,
            variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True", **variables},
            pointed=f"`{next(iter(variables))}`",
        )
        for dialect, variables in (
            (Dialect.CHAT, {"OPENAI_API_BASE": "$url/v1", "OPENAI_API_KEY": "$key"}),
            (Dialect.MESSAGES, {"ANTHROPIC_API_BASE": "$url", "ANTHROPIC_API_KEY": "$key"}),
        )
    ),
)
