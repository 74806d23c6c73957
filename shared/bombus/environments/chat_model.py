"""A model served over the OpenAI protocol. httpx requests one answer at a time from it."""

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import httpx
import msgspec

from bombus.environments.kinds import MessageDict, ToolCall, ToolSchema
from bombus.errors import FOREIGN_TEXT_MAX, Code, in_one_line
from bombus.hive.failures import FailureKind
from bombus.machine.certificates import certificates
from bombus.machine.host_names import is_loopback
from bombus.sdk.errors import InfraError

log = logging.getLogger("bombus")

CONNECT_S = 10.0
QUIET_S = 1.0  # time without an answer before a warning is logged
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 8.0
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
TOO_LONG_CODES = frozenset({"context_length_exceeded", "prompt_too_long"})
TOO_LONG_WORDS = ("maximum context length", "context length is")  # in messages from servers without a code for this
ROLE_HEADER = "x-bombus-role"
TOTAL_TOKENS_HEADER = "x-bombus-total-tokens"
RETRY_HEADER = "x-stainless-retry-count"  # tells a hive that this is a retry, so that it repeats its recorded answer
POLICY_VERSIONS = re.compile(r"bombus-(\d{1,9})(?:-(\d{1,9}))?")
ECHOED = ("role", "content", "tool_calls", "reasoning_content", "reasoning")


class NoModelAnswer(InfraError):
    """The server gave no answer, or an unreadable one."""

    failure = FailureKind.MODEL


class ModelRefused(InfraError):
    """The server refused a request.

    `is_too_long` says that the prompt is longer than the model or the job allows, and `is_over` that the episode is
    over.
    """

    def __init__(self, why: str, is_too_long: bool = False, is_over: bool = False) -> None:
        refused = FailureKind.TOKENS if is_too_long else FailureKind.MODEL
        super().__init__(why, FailureKind.HIVE if is_over else refused)
        self.is_too_long = is_too_long
        self.is_over = is_over


def beginning_refused(error: ModelRefused, tokens_max: int) -> ModelRefused:
    """Return the error for a first prompt that is too long. The error ends with the server's own message about its
    limit."""
    why = (
        f"the first prompt of the episode, with its tools, is too long for the job, the model or tokens_max "
        f"({tokens_max} for prompt and answer together): {error}"
    )
    return ModelRefused(why, is_too_long=True)


def never_answered(episode_s: float) -> NoModelAnswer:
    """Return the error for an episode that ran out of time before the first answer, which is not the model's fault."""
    return NoModelAnswer(f"the model gave no answer within {episode_s:g} s, which is all of the episode's time")


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer from the model. `message` continues the conversation; `call` is the call's id on the log."""

    message: MessageDict
    text: str
    tool_calls: tuple[ToolCall, ...]
    finish: str
    prompt_tokens: int
    completion_tokens: int
    call: str
    versions: tuple[int, ...] = ()  # oldest and newest policy versions that sampled the answer, if a hive names them

    @property
    def is_cut(self) -> bool:
        """Whether the answer was cut off at its length limit."""
        return self.finish == "length"


class CallWatch(Protocol):
    """An observer that is notified when calls to a server are answered or fail, in any of its episodes."""

    def answered(self) -> None:
        """Note that a call was answered."""
        ...

    def asked_again(self, why: str) -> None:
        """Note that a call failed and will be retried. Raises `NoModelAnswer` to stop retrying."""
        ...


class OutageWarnings:
    """A `CallWatch` that warns once calls have been failing for a second, so that waiting is not mistaken for work.

    It warns only once per outage: there is no second warning until a call has been answered.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failing_since: float | None = None
        self._has_warned = False

    def answered(self) -> None:
        """Forget the failures so far."""
        self._failing_since, self._has_warned = None, False

    def asked_again(self, why: str) -> None:
        """Warn if calls have been failing for a second and this outage has not been reported yet."""
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        if not self._has_warned and now - self._failing_since >= QUIET_S:
            self._has_warned = True
            log.warning("the model's server is not answering; retrying: %s", why)


class ChatModel:
    """A model on a server. Use it with `async with`, in one event loop.

    `sampling` contains fields for every request, such as `temperature`. `watch` is notified of every call. `transport`
    is for tests.
    """

    def __init__(  # noqa: PLR0913 - a server, and options of its requests
        self,
        base_url: str,
        api_key: str,
        model: str,
        *,
        sampling: Mapping[str, Any] | None = None,
        watch: CallWatch | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.model = model
        self._watch = watch
        self.versions: set[int] = set()  # the policy versions that sampled the answers so far, if a hive names them
        self._sampling = dict(sampling or {})
        url = httpx.URL(base_url)
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # the time limit in `ask` covers the whole request
            trust_env=not is_loopback(url.host),
            verify=url.scheme == "https" and certificates(True),
            transport=transport,
        )

    async def __aenter__(self) -> "ChatModel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(  # noqa: PLR0913 - the parts of a request
        self,
        messages: Sequence[MessageDict],
        *,
        within_s: float,
        tools: Sequence[ToolSchema] = (),
        max_tokens: int | None = None,
        total_tokens: int | None = None,
        role: str = "",
    ) -> ChatAnswer:
        """Return the model's answer. While the server is unreachable or busy, retry until `within_s` has passed.

        `total_tokens` limits prompt and answer together if the server is a hive. Raises `ModelRefused` if the server
        refuses the request, or `NoModelAnswer` if there is no usable answer for any other reason.
        """
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), **self._sampling}
        if tools:
            body["tools"] = [tool.as_openai() for tool in tools]
        if max_tokens is not None:  # a limit in `sampling` also applies
            body["max_tokens"] = min(max_tokens, body.get("max_tokens", max_tokens))
        headers = {"Content-Type": "application/json"}
        if role:
            headers[ROLE_HEADER] = role
        if total_tokens is not None:
            headers[TOTAL_TOKENS_HEADER] = str(total_tokens)
        content = msgspec.json.encode(body)
        last = ["it did not answer"]
        try:
            async with asyncio.timeout(within_s):
                return await self._until_answered(content, headers, last)
        except TimeoutError as error:
            raise NoModelAnswer(f"the model gave no answer within {within_s:g} s: {last[0]}") from error

    async def _until_answered(self, content: bytes, headers: dict[str, str], last: list[str]) -> ChatAnswer:
        attempt = 0
        while True:
            if attempt:
                headers[RETRY_HEADER] = str(min(attempt, 99))
            at_least_s = 0.0
            try:
                response = await self._http.post("/chat/completions", content=content, headers=headers)
            except httpx.RequestError as error:
                last[0] = f"{self._http.base_url}: {in_one_line(error)}"
            else:
                if response.is_success:
                    if self._watch is not None:
                        self._watch.answered()
                    answer = answer_of(response.content)
                    self.versions.update(answer.versions)
                    return answer
                refusal = _refusal(response)
                if response.status_code not in RETRIED:
                    raise refusal
                last[0] = str(refusal)
                at_least_s = _retry_after_s(response)
            if self._watch is not None:
                self._watch.asked_again(last[0])
            pause = min(BACKOFF_FIRST_S * 2 ** min(attempt, 10), BACKOFF_MAX_S)
            await asyncio.sleep(max(pause, at_least_s) * (1 + random.random() / 2))
            attempt += 1


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] | None = None
    id: object = None  # used only from a hive; other servers may send any value
    usage: _Usage | None = None
    system_fingerprint: object = None
    error: object = None


def answer_of(body: bytes) -> ChatAnswer:
    """Return the answer in a chat completion. Raises `NoModelAnswer` if the body is not a chat completion."""
    try:
        found = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NoModelAnswer(f"the server's answer is not a chat completion: {in_one_line(error)}") from error
    if not found.choices:
        raise NoModelAnswer(f"the server's answer has no choice{_said(found.error)}")
    if found.usage is None:
        raise NoModelAnswer("the server's answer has no `usage`, which the token budgets need")
    choice = found.choices[0]
    message = {name: choice.message[name] for name in ECHOED if choice.message.get(name) is not None}
    message.setdefault("role", "assistant")
    calls = _tool_calls(message)
    if not calls:
        message.pop("tool_calls", None)
        message.setdefault("content", "")
    if isinstance(message.get("content"), list):
        message["content"] = _text_of_parts(message["content"])
    content = message.get("content", "")
    return ChatAnswer(
        message=message,
        text=content if isinstance(content, str) else "",
        tool_calls=calls,
        finish=choice.finish_reason or "",
        prompt_tokens=found.usage.prompt_tokens,
        completion_tokens=found.usage.completion_tokens,
        call=found.id.removeprefix("chatcmpl-") if isinstance(found.id, str) else "",
        versions=_versions(found.system_fingerprint),
    )


def _text_of_parts(parts: list[Any]) -> str:
    """Return the text of a message whose content is a list of parts, as some servers send it. Reasoning is in parts of
    other types."""
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str))


def _versions(fingerprint: object) -> tuple[int, ...]:
    """Return the policy versions in a hive's fingerprint. Fingerprints of other servers yield none."""
    named = POLICY_VERSIONS.fullmatch(fingerprint) if isinstance(fingerprint, str) else None
    return tuple(int(number) for number in named.groups() if number) if named else ()


def _tool_calls(message: MessageDict) -> tuple[ToolCall, ...]:
    """Return the tool calls of a message. Raises `NoModelAnswer` if any is malformed, which is the server's fault."""
    try:
        return tuple(
            ToolCall(
                id=each["id"],
                name=each["function"]["name"],
                arguments=_text(each["function"].get("arguments")),
            )
            for each in message.get("tool_calls") or ()
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise NoModelAnswer(f"the server's tool calls have no id or no function: {in_one_line(error)}") from error


def _text(arguments: object) -> str:
    """Return a call's arguments as JSON text. Some servers send the object itself."""
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()


def _said(error: object) -> str:
    """Return a colon and the error message in an answer that has no choices, or "" if it has no message."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return f": {' '.join(str(message).split())[:FOREIGN_TEXT_MAX]}" if message else ""


def _refusal(response: httpx.Response) -> ModelRefused:
    message, code = (response.text or response.headers.get("location", ""))[:FOREIGN_TEXT_MAX], ""
    try:
        error = msgspec.json.decode(response.content, type=dict[str, Any]).get("error")
        if isinstance(error, dict):
            message, code = str(error.get("message", message)), str(error.get("code", ""))
    except msgspec.MsgspecError:
        pass  # for instance, a proxy's error page: its text is shown unchanged
    is_too_long = response.status_code in (400, 413) and (
        code in TOO_LONG_CODES or any(words in message for words in TOO_LONG_WORDS)
    )
    why = f"the server answered {response.status_code}: {' '.join(message.split())}"
    return ModelRefused(why, is_too_long, is_over=code == Code.EPISODE_OVER)


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return max(0.0, min(float(response.headers.get("retry-after", 0)), 60.0))
    except ValueError:
        return 0.0  # the header has a date
