"""What the two HTTP APIs of vLLM have in common: usage, errors, and labels of weights."""

from msgspec import Struct

from bombus_inference.backends.http_calls import BackendFailed


class WeightLabel(Struct, frozen=True):
    """The label that a server is given for its weights. The server only repeats it, so it has the run as well."""

    run: int
    version: int

    def __str__(self) -> str:
        return f"{self.run}/{self.version}"


class PromptDetails(Struct):
    cached_tokens: int | None = None


class PromptUsage(Struct):
    prompt_tokens_details: PromptDetails | None = None


class ServerError(Struct):
    message: str = ""


class ServerAnswer(Struct):
    """The part of an answer, or of a server-sent event, that every API of vLLM has."""

    usage: PromptUsage | None = None
    error: ServerError | None = None

    def check(self) -> None:
        """Raises `BackendFailed` with the server's own message if this is an error."""
        if self.error is not None:
            raise BackendFailed(self.error.message)

    @property
    def cached_prompt_tokens(self) -> int:
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return (details.cached_tokens or 0) if details is not None else 0
