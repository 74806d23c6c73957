"""A request for completions, as `call/` knows it: no dialect's words. A door turns its wire into one of these."""

from typing import Any

import msgspec

from bombus.config.template_variables import problem_of
from bombus.errors import Code, Refused
from bombus_gateway import limits
from bombus_gateway.keys import KeyClaims
from bombus_gateway.text.message import ChatMessage


class InvalidField(Refused):
    """A refusal of one field of a `CompletionRequest`. A door translates `field` into its own wire's name."""

    def __init__(self, code: Code, field: str, why: str) -> None:
        super().__init__(code, why)
        self.field = field


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be sampled: an answer to `messages` where `chat` is true, else what follows `prompt`.

    A prompt is text, in which special tokens are written by name, or token ids. `n` completions are sampled, and end
    at one of `stops`. `parse_tool_calls`: whether the answer is searched for calls of `tools`. `stream`: whether text
    is wanted as it comes. `chat_template_kwargs` are variables of the model's chat template, which win over the job's.
    None leaves a value to the job. Raises `Refused` when it is made with too many messages or completions, or with
    variables that nobody may give.
    """

    chat: bool
    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    parse_tool_calls: bool = False
    prompt: str | list[int] = ""
    n: int = 1
    stops: tuple[str, ...] = ()
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] = {}

    def __post_init__(self) -> None:
        if len(self.messages) > limits.MESSAGES:
            raise Refused(Code.TOO_LARGE, f"{len(self.messages)} messages are over the limit of {limits.MESSAGES}.")
        if self.n > limits.CHOICES:
            raise Refused(Code.MALFORMED, f"n is {self.n}, and the limit is {limits.CHOICES}.")
        problem = problem_of(self.chat_template_kwargs)
        if problem:
            raise InvalidField(Code.MALFORMED, "chat_template_kwargs", f"chat_template_kwargs: {problem}.")

    @property
    def input_field(self) -> str:
        """The name of the field that has the prompt."""
        return "messages" if self.chat else "prompt"


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A completion request with its envelope: whose it is, and how it arrived.

    `digest` is that of the route and the body: a retry of a request has the same one. `retried`: the client says that
    it has sent this request before. `role` names the agent within its episode.
    """

    claims: KeyClaims
    completion: CompletionRequest
    digest: bytes
    body_bytes: int
    received_ns: int
    retried: bool = False
    role: str = ""
    traceparent: str = ""

    @property
    def key(self) -> tuple[str, bytes]:
        """What makes two requests the same one."""
        return self.claims.episode, self.digest
