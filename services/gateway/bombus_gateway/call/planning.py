"""The plan of a call: the stored conversation that it continues, its prompt as tokens, and its sampling parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.generation import Constraint
from bombus.hive.records import SamplingParams, pack_tokens
from bombus_gateway.call.admission import Admitted, AnswerLimit
from bombus_gateway.call.request import CallRequest
from bombus_gateway.call.workers import INLINE_BYTES_MAX, READ_BYTES_MAX, Workers
from bombus_gateway.history.conversation import Conversation, Node
from bombus_gateway.history.echoes import Followed
from bombus_gateway.history.histories import Histories
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.renderer import TemplateRenderer
from bombus_gateway.text.rendering import TextModel

TRIAL_BYTES = 1 << 20  # size of a request that takes as long as trying out a template with new variables
TOKEN_TEXT_BYTES = 4  # of text for each token, roughly
TRIED_MAX = 4  # equal answers to try: the template may be unable to continue the first of them


@dataclass(frozen=True)
class Prompt:
    """The prompt of a call.

    `tokens` is int32; its last `tail` bytes are new, and the bytes before them are the tokens of `node`. `messages` are
    the ones that the conversation of `node` lacks, and `digest` is that of all messages; a plain completion has none.
    """

    tokens: bytes
    tail: int
    node: Node | None = None
    messages: tuple[ChatMessage, ...] = ()
    digest: bytes = b""

    @property
    def count(self) -> int:
        """The number of tokens."""
        return len(self.tokens) // 4


@dataclass(frozen=True)
class CallPlan:
    """The plan of a call. `answer_limit` is for each choice; `overridden` names what was asked for but is not applied.

    The engine enforces `constraint`; `constrained` names the demands that it meets. `masked`: this is an auxiliary
    call, and the job does not train on those.
    """

    model: TextModel
    prompt: Prompt
    sampling: SamplingParams
    answer_limit: AnswerLimit
    overridden: tuple[str, ...] = ()
    constraint: Constraint | None = None
    constrained: tuple[str, ...] = ()
    masked: bool = False


async def plan_call(request: CallRequest, admitted: Admitted, histories: Histories, workers: Workers) -> CallPlan:
    """Find the call that a request continues, and render the rest of its prompt, in a thread if it is large.

    Raises `Refused` if the prompt is too long, or if earlier turns cannot be read.
    """
    completion = request.completion
    prompt = await plan_prompt(request, admitted, histories, workers)
    answered = any(message["role"] == "assistant" for message in completion.messages)
    node = prompt.node
    before = node.sampled if node is not None else 0
    limit = admitted.answer_limit(completion, prompt.count, before, is_first=node is None and not answered)
    constraint, unmet = admitted.constraint(completion, prompt.tokens)
    constrained = () if constraint is None else tuple(demand.field for demand in completion.demands)
    if unmet:
        completion = msgspec.structs.replace(completion, unsupported=(*unmet, *completion.unsupported))
    sampling, overridden = admitted.sampling(completion, limit)
    masked = bool(request.auxiliary_call) and not admitted.job.rollout.trains_auxiliary_calls
    return CallPlan(admitted.model, prompt, sampling, limit, overridden, constraint, constrained, masked)


async def plan_prompt(request: CallRequest, admitted: Admitted, histories: Histories, workers: Workers) -> Prompt:
    """Return the prompt of a request, even if it leaves no room for an answer. Raises `Refused` as `plan_call` does."""
    if request.body_bytes > admitted.characters_max:
        check = partial(admitted.check_characters, request.completion)
        await workers.run(request.claims.episode, request.body_bytes, check)
    if request.completion.chat:
        return await _chat_prompt(request, admitted.model, histories, workers)
    conversation = histories.conversation(request.claims)
    plain = partial(_plain_prompt, request, admitted.model, conversation)
    prompt = await workers.run(request.claims.episode, request.body_bytes, plain)
    if prompt.node is None and not all(map(conversation.knows, admitted.recorded)):  # it may continue one of these
        await histories.read_log(request.claims, request.traceparent)
        prompt = await workers.run(request.claims.episode, request.body_bytes, plain)
    return prompt


async def _chat_prompt(request: CallRequest, model: TextModel, histories: Histories, workers: Workers) -> Prompt:
    renderer, tools = model.renderer.given(request.completion.chat_template_kwargs), request.completion.tools
    followed = await histories.follow(request)
    history_bytes = TOKEN_TEXT_BYTES * followed.last.count if followed.last is not None else 0
    # A request may be the first with variables that have to be tried.
    work_bytes = max(request.body_bytes, history_bytes, 0 if renderer.is_tried else TRIAL_BYTES)
    is_read_at_once = work_bytes > INLINE_BYTES_MAX and request.read_bytes <= READ_BYTES_MAX
    prompt = _extended_shortly(tools, renderer, followed) if is_read_at_once else None
    if prompt is None:
        rendered = partial(_rendered, tools, renderer, followed)
        prompt = await workers.run(request.claims.episode, work_bytes, rendered)
    return prompt


def _extended_shortly(
    tools: Sequence[Mapping[str, Any]], renderer: TemplateRenderer, followed: Followed[Node]
) -> Prompt | None:
    """Extend a long conversation by rendering a short part of it, which is quick. Return None if that is impossible."""
    if followed.last is None or renderer.decodes_history or not renderer.is_tried:
        return None
    shorter = renderer.shortened(renderer.adapted(followed.messages), followed.count, tools)
    if shorter is None or len(msgspec.json.encode([shorter.messages, shorter.tools])) > INLINE_BYTES_MAX:
        return None
    history = followed.last.tokens
    tail = renderer.extend_by(history, followed.last.completion_at, shorter)
    return None if tail is None else _extended(followed, followed.last, history, tail)


def _rendered(tools: Sequence[Mapping[str, Any]], renderer: TemplateRenderer, followed: Followed[Node]) -> Prompt:
    messages = renderer.adapted(followed.messages)
    for node in followed.candidates[:TRIED_MAX]:
        history = node.tokens
        tail = renderer.extend(history, node.completion_at, messages, followed.count, tools)
        if tail is not None:
            return _extended(followed, node, history, tail)
    # The model's template drops part of what was sampled (reasoning), so the call begins a new branch.
    tokens = pack_tokens(renderer.render(messages, tools))
    return Prompt(tokens, len(tokens), None, tuple(followed.messages), followed.digests[-1])


def _extended(followed: Followed[Node], node: Node, history: bytes, tail: list[int]) -> Prompt:
    packed, new = pack_tokens(tail), tuple(followed.messages[followed.count :])
    return Prompt(history + packed, len(packed), node, new, followed.digests[-1])


def _plain_prompt(request: CallRequest, model: TextModel, conversation: Conversation) -> Prompt:
    prompt = request.completion.prompt
    if isinstance(prompt, str):
        tokens = pack_tokens(model.tokenizer.encode(prompt))
    elif max(prompt) >= len(model.tokenizer.pieces):
        raise Refused(Code.MALFORMED, f"prompt holds token {max(prompt)}, which is outside the vocabulary.")
    else:
        tokens = pack_tokens(prompt)
    node = conversation.longest_tokens(tokens)
    return Prompt(tokens, len(tokens) - (4 * node.count if node is not None else 0), node)
