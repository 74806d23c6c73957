"""A request for completions, independent of any dialect. Each API translates its wire format into a
`CompletionRequest`."""

from typing import Any, NamedTuple

import msgspec

from bombus.config.template_variables import problem_of
from bombus.errors import Code, Refused
from bombus_gateway import limits
from bombus_gateway.keys import KeyClaims
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.thinking import RequestedThinking

TOP_P_MIN = 1e-6


class InvalidField(Refused):
    """A refusal of one field of a `CompletionRequest`. An API translates `field` into its name on the wire."""

    def __init__(self, code: Code, field: str, why: str) -> None:
        super().__init__(code, why)
        self.field = field


class PromptTooLong(InvalidField):
    """The refusal of a prompt of at least `tokens` tokens where at most `tokens_max` are accepted."""

    def __init__(self, field: str, why: str, tokens: int, tokens_max: int) -> None:
        super().__init__(Code.PROMPT_TOO_LONG, field, why)
        self.tokens = tokens
        self.tokens_max = tokens_max


class RequestedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a client wants tokens to be drawn. The defaults leave the choice to the job; `call/policy.py` determines what
    applies."""

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0  # 0 means all tokens
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}  # by token id
    seed: int | None = None
    max_tokens: int | None = None
    total_tokens: int | None = None  # limit for prompt and answer together


def requested_top_p(given: float | None) -> float:
    """Return the requested top_p. Replace 0 with the smallest value that replicas accept: both draw only the likeliest
    token."""
    return 1.0 if given is None else max(given, TOP_P_MIN)


class Unsupported(NamedTuple):
    """An unsupported part of a request. `field` is its name on the wire, and `why` is a human-readable clause.

    `is_content` is true for a part of the conversation that the model would not see, such as an image.
    """

    field: str
    why: str
    is_content: bool = False


class Demand(NamedTuple):
    """A client's demand on the form of an answer: JSON that matches `schema`, or only calls of `tools`.

    `field` is the demand's name on the wire. If `once` is true, there must be exactly one call.
    """

    field: str
    schema: dict[str, Any] | None = None
    tools: tuple[str, ...] = ()
    once: bool = False


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to sample answers to `messages` if `chat` is true, and otherwise to sample continuations of `prompt`.

    A prompt is either text, in which special tokens are written by name, or token ids. `n` completions are sampled;
    each ends at one of `stops` or `stop_token_ids`, or at one of the model's own stop tokens. If `parse_tool_calls` is
    true, the answer is searched for calls of `tools`. If `stream` is true, text is sent as it arrives.
    `chat_template_kwargs` are variables of the model's chat template, which override the job's. `thinking` is
    translated into such variables if the template has them. `continues` is the id of an earlier call in the episode,
    whose conversation precedes `messages`. `answers` maps places in `messages` to the ids of earlier calls whose
    answers belong there.

    `demands` are met if the engine can enforce them. `one_call` is the name of the field, if any, that requires an
    answer to end after its first call. `unsupported` lists what else was requested; the job determines whether it is
    refused or ignored. `length_field` is the name on the wire of the field that sets `max_tokens`.

    Raises `Refused` for too many messages, completions or unsupported parts, and for invalid template variables.
    """

    chat: bool
    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    parse_tool_calls: bool = False
    prompt: str | list[int] = ""
    n: int = 1
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    sampling: RequestedSampling = RequestedSampling()
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    thinking: RequestedThinking | None = None
    continues: str = ""
    answers: dict[int, str] = {}
    demands: tuple[Demand, ...] = ()
    one_call: str = ""
    unsupported: tuple[Unsupported, ...] = ()
    length_field: str = "max_tokens"

    def __post_init__(self) -> None:
        if len(self.messages) > limits.MESSAGES:
            raise Refused(Code.TOO_LARGE, f"{len(self.messages)} messages are over the limit of {limits.MESSAGES}.")
        if len(self.unsupported) > limits.UNSUPPORTED:
            why = (
                f"{len(self.unsupported)} parts that are not supported here are over the limit of {limits.UNSUPPORTED}."
            )
            raise Refused(Code.TOO_LARGE, why)
        if self.n > limits.CHOICES:
            raise Refused(Code.MALFORMED, f"n is {self.n}, but the limit is {limits.CHOICES}.")
        problem = problem_of(self.chat_template_kwargs)
        if problem:
            raise InvalidField(Code.MALFORMED, "chat_template_kwargs", f"chat_template_kwargs: {problem}.")

    @property
    def input_field(self) -> str:
        """The name of the field that contains the prompt."""
        return "messages" if self.chat else "prompt"


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A completion request with its metadata: its episode's key, and how it arrived.

    `digest` covers the route and the body, so a retry has the same digest. `retry` is how often, according to the
    client, this request was sent before. `read_bytes` is the work of reading the body, expressed in bytes: it is less
    than `body_bytes` if the body's beginning was already parsed. `role` names the agent within its episode.
    `auxiliary_call` is the purpose of a call that the harness makes for itself, for example to get a title for the
    session, and is empty for all other calls.
    """

    claims: KeyClaims
    completion: CompletionRequest
    digest: bytes
    body_bytes: int
    received_ns: int
    read_bytes: int = 0
    retry: int = 0
    role: str = ""
    auxiliary_call: str = ""
    traceparent: str = ""

    @property
    def key(self) -> tuple[str, bytes]:
        """The key that equal requests of an episode share."""
        return self.claims.episode, self.digest


def check_sampled(answers: int, tokens: int, alternatives: int) -> None:
    """Raise `Refused` TOO_LARGE if this many answers, tokens and alternatives exceed the limits for one request."""
    what = f"{answers} answers of up to {tokens} tokens"
    if answers * tokens > limits.SAMPLED_TOKENS:
        why = f"{what} are over the limit of {limits.SAMPLED_TOKENS} tokens in one request"
        raise Refused(Code.TOO_LARGE, f"{why}: ask for fewer answers at once, or set a smaller max_tokens.")
    if answers * tokens * alternatives > limits.SAMPLED_ALTERNATIVES:
        why = f"{what}, each with {alternatives} alternatives, are over the limit of {limits.SAMPLED_ALTERNATIVES}"
        raise Refused(
            Code.TOO_LARGE, f"{why} alternatives in one request: ask for fewer answers, tokens or alternatives."
        )
