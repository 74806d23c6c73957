"""The common parts of the servers' HTTP APIs: sampling parameters, usage, errors, and weight labels."""

from msgspec import Struct

from bombus.hive.records import SamplingParams
from bombus_inference.backends.http_calls import BackendFailed


class WeightLabel(Struct, frozen=True):
    """The label that a server is given for its weights, and that it only echoes. It includes the run, because versions
    of different runs have the same numbers."""

    run: int
    version: int

    def __str__(self) -> str:
        return f"{self.run}/{self.version}"


def penalty_fields(sampling: SamplingParams) -> dict[str, object]:
    """Return the penalties, `min_p` and `logit_bias` of a request, under the names that all servers use.

    The keys of `logit_bias` become strings in JSON, as these servers expect.
    """
    fields: dict[str, object] = {
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": sampling.logit_bias,
    }
    wanted = {name: value for name, value in fields.items() if value}
    if sampling.repetition_penalty != 1:
        wanted["repetition_penalty"] = sampling.repetition_penalty
    return wanted


class PromptDetails(Struct):
    cached_tokens: int | None = None


class PromptUsage(Struct):
    prompt_tokens_details: PromptDetails | None = None


class ServerError(Struct):
    message: str = ""


class ServerAnswer(Struct):
    """The part that the answers and server-sent events of every vLLM API have in common."""

    usage: PromptUsage | None = None
    error: ServerError | None = None

    def check(self) -> None:
        """Raise `BackendFailed` with the server's own message if this answer is an error."""
        if self.error is not None:
            raise BackendFailed(self.error.message)

    @property
    def cached_prompt_tokens(self) -> int:
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return (details.cached_tokens or 0) if details is not None else 0


class ScoredToken(Struct):
    """A token of a prompt, as vLLM scores it."""

    logprob: float
