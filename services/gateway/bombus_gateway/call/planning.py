"""The plan of a call: which stored conversation the call continues, its prompt as tokens, how long its answer may be,
and how the answer is sampled."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.generation import Constraint
from bombus.hive.records import LengthLimit, SamplingParams, pack_tokens
from bombus_gateway.call.admission import Admitted
from bombus_gateway.call.constraining import constraint_of, why_not_held
from bombus_gateway.call.policy import decide, why_unconstrained
from bombus_gateway.call.request import (
    CallRequest,
    CompletionRequest,
    InvalidField,
    PromptTooLong,
    Unsupported,
    check_sampled,
)
from bombus_gateway.call.workers import INLINE_BYTES_MAX, READ_BYTES_MAX, Workers
from bombus_gateway.history.conversation import Conversation, Node
from bombus_gateway.history.echoes import Followed
from bombus_gateway.history.histories import Histories
from bombus_gateway.history.identity import root_digest
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.renderer import TemplateRenderer
from bombus_gateway.text.rendering import TextModel
from bombus_gateway.text.stops import asked_stops, hidden_names

TRIAL_BYTES = 1 << 20  # size of a request that takes as much work as trying out new template variables
TOKEN_TEXT_BYTES = 4  # approximate bytes of text per token
_LISTED = "this model writes several calls as one list, which cannot end after its first"
TRIED_MAX = 4  # maximum number of equal answers to try, as the template may be unable to continue the first ones


class Prompt(msgspec.Struct, frozen=True):
    """The prompt of a call.

    `tokens` is int32. Its last `tail` bytes are new; the bytes before these are the tokens of `node`. `messages` are
    the messages that the conversation of `node` lacks, and `digest` covers all messages. The prompt of a plain
    completion has neither messages nor a digest.
    """

    tokens: bytes
    tail: int
    node: Node | None = None
    messages: tuple[ChatMessage, ...] = ()
    digest: bytes = b""

    @property
    def count(self) -> int:
        """The number of tokens in the prompt."""
        return len(self.tokens) // 4


class AnswerLimit(msgspec.Struct, frozen=True):
    """The maximum number of tokens in an answer, and the reason for this limit."""

    tokens: int
    reason: LengthLimit

    def reason_at(self, tokens: int) -> LengthLimit:
        """Return which limit cut off an answer after `tokens` tokens. It was the replica's limit if our own would have
        allowed more tokens."""
        return LengthLimit.REPLICA if tokens < self.tokens else self.reason


class CallPlan(msgspec.Struct, frozen=True):
    """The plan of a call. `answer_limit` applies to each choice; `overridden` names what was requested but not applied.

    The engine enforces `constraint`, and `constrained` names the client's demands that the constraint meets. `masked`
    is true for an auxiliary call if the job does not train on auxiliary calls.
    """

    model: TextModel
    prompt: Prompt
    sampling: SamplingParams
    answer_limit: AnswerLimit
    overridden: tuple[str, ...] = ()
    constraint: Constraint | None = None
    constrained: tuple[str, ...] = ()
    masked: bool = False


async def plan_call(
    request: CallRequest, admitted: Admitted, conversation: Conversation, histories: Histories, workers: Workers
) -> CallPlan:
    """Return a call's plan. If another call has meanwhile begun to continue the same answer, the plan is made again.

    The plan is valid until the next await. Raises `Refused` if the prompt is too long, or if earlier turns cannot be
    read.
    """
    while True:
        count = conversation.continuing_count
        plan = await _plan(request, admitted, histories, workers)
        node = plan.prompt.node
        if node is None or conversation.continuing_count == count or not conversation.is_continued(node):
            return plan


async def _plan(request: CallRequest, admitted: Admitted, histories: Histories, workers: Workers) -> CallPlan:
    """Find the call that a request continues, and render the rest of the request's prompt. A large prompt is rendered
    in a thread."""
    completion = request.completion
    prompt = await plan_prompt(request, admitted, histories, workers)
    answered = any(message["role"] == "assistant" for message in completion.messages)
    node = prompt.node
    before = node.sampled if node is not None else 0
    limit = answer_limit(admitted, completion, prompt.count, before, is_first=node is None and not answered)
    constraint, unmet = answer_constraint(admitted, completion, prompt.tokens)
    constrained = () if constraint is None else tuple(demand.field for demand in completion.demands)
    if unmet:
        completion = msgspec.structs.replace(completion, unsupported=(*unmet, *completion.unsupported))
    sampling, overridden = sampling_params(admitted, completion, limit)
    masked = bool(request.auxiliary_call) and not admitted.job.rollout.trains_auxiliary_calls
    return CallPlan(admitted.model, prompt, sampling, limit, overridden, constraint, constrained, masked)


async def plan_prompt(request: CallRequest, admitted: Admitted, histories: Histories, workers: Workers) -> Prompt:
    """Return the prompt of a request, even if it leaves no room for an answer. Raises `Refused` in the same cases as
    `plan_call`."""
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
    followed = await _followed(request, histories, workers)
    history_bytes = TOKEN_TEXT_BYTES * followed.last.count if followed.last is not None else 0
    # This may be the first request with variables that have to be tried out.
    work_bytes = max(request.body_bytes, history_bytes, 0 if renderer.is_tried else TRIAL_BYTES)
    is_read_at_once = work_bytes > INLINE_BYTES_MAX and request.read_bytes <= READ_BYTES_MAX
    prompt = _extended_shortly(tools, renderer, followed) if is_read_at_once else None
    if prompt is None:
        rendered = partial(_rendered, tools, renderer, followed)
        prompt = await workers.run(request.claims.episode, work_bytes, rendered)
    return prompt


async def _followed(request: CallRequest, histories: Histories, workers: Workers) -> Followed[Node]:
    """Find the conversation that a request's messages extend, in a thread if many of the messages are new.

    An assistant message that is not known here may have been sampled through another gateway. So the log is read before
    the message is attributed to the harness, or matched with an answer that merely has the same words. Raises `Refused`
    BUS_DOWN if the log cannot be read.
    """
    claims, completion = request.claims, request.completion
    conversation = histories.conversation(claims)
    find = partial(_found, conversation, completion)
    known = conversation.known
    try:
        found = _found_at_once(conversation, request)
        if found is None:
            found = await workers.run(claims.episode, request.body_bytes, find)
        if _may_be_elsewhere(found):
            await histories.read_log(claims, request.traceparent)
            if conversation.known != known:
                conversation.forget_walks()
                found = await workers.run(claims.episode, request.body_bytes, find)
        return found
    finally:
        histories.account_for(claims)


def _found(conversation: Conversation, completion: CompletionRequest) -> Followed[Node]:
    root = root_digest(completion.tools, completion.chat_template_kwargs, shared=True)
    return conversation.follow(root, completion.messages, completion.stops)


def _found_at_once(conversation: Conversation, request: CallRequest) -> Followed[Node] | None:
    """Return the result of `_found` for a large request with little new in it. Return None for other requests."""
    if request.body_bytes <= INLINE_BYTES_MAX or request.read_bytes > READ_BYTES_MAX:
        return None
    completion = request.completion
    root = root_digest(completion.tools, completion.chat_template_kwargs, shared=True)
    return conversation.follow_on(root, completion.messages, completion.stops, INLINE_BYTES_MAX)


def _may_be_elsewhere(found: Followed[Node]) -> bool:
    """Return whether the request may contain an answer that was sampled through another gateway."""
    return found.doubt or any(message["role"] == "assistant" for message in found.messages[found.count :])


def _extended_shortly(
    tools: Sequence[Mapping[str, Any]], renderer: TemplateRenderer, followed: Followed[Node]
) -> Prompt | None:
    """Extend a long conversation by rendering only a short part of it, which is quick. Return None if that is
    impossible."""
    if followed.last is None or renderer.decodes_history or not renderer.is_tried:
        return None
    messages = renderer.adapted(followed.messages, followed.outline)
    shorter = renderer.shortened(messages, followed.count, tools, followed.outline)
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
        raise Refused(Code.MALFORMED, f"prompt contains token {max(prompt)}, which is outside the vocabulary.")
    else:
        tokens = pack_tokens(prompt)
    node = conversation.longest_tokens(tokens)
    return Prompt(tokens, len(tokens) - (4 * node.count if node is not None else 0), node)


def answer_limit(
    admitted: Admitted, request: CompletionRequest, prompt_tokens: int, answered_tokens: int, is_first: bool
) -> AnswerLimit:
    """Return how long an answer may be. Pure.

    The job's max_prompt_length limits a prompt without answers (`is_first`). Later prompts contain answers too, and are
    limited only by max_model_len and the model's context. `answered_tokens` were sampled earlier in the same
    conversation; the job's max_response_length limits all of the conversation's answers together. Raises `InvalidField`
    PROMPT_TOO_LONG if the prompt exceeds a limit.
    """
    rollout = admitted.job.rollout
    if is_first and prompt_tokens > rollout.max_prompt_length:
        raise PromptTooLong(
            request.input_field,
            f"The prompt has {prompt_tokens} tokens; the job's max_prompt_length is {rollout.max_prompt_length}.",
            prompt_tokens,
            rollout.max_prompt_length,
        )
    bounds = (
        AnswerLimit(rollout.max_response_length_in_one_turn, LengthLimit.TURN),
        AnswerLimit(rollout.max_response_length - answered_tokens, LengthLimit.EPISODE),
        AnswerLimit(rollout.max_model_len - prompt_tokens, LengthLimit.JOB),
        AnswerLimit(admitted.model.context_tokens - prompt_tokens, LengthLimit.CONTEXT),
    )
    limit = min(bounds, key=lambda each: each.tokens)
    if limit.tokens < 1:
        raise _too_long(admitted, request.input_field, limit, prompt_tokens, answered_tokens)
    wanted = _wanted(request, prompt_tokens)
    if wanted is not None and wanted < limit.tokens:
        return AnswerLimit(wanted, LengthLimit.REQUEST)
    return limit


def _wanted(request: CompletionRequest, prompt_tokens: int) -> int | None:
    """Return the maximum number of tokens that the client allows for the answer, or None if the client sets no limit.

    Raises `InvalidField` PROMPT_TOO_LONG if the client's limit for prompt and answer together leaves no tokens for the
    answer.
    """
    sampling = request.sampling
    if sampling.total_tokens is None:
        return sampling.max_tokens or None
    left = sampling.total_tokens - prompt_tokens
    if left < 1:
        raise PromptTooLong(
            request.input_field,
            f"The prompt has {prompt_tokens} tokens; this client's x-bombus-total-tokens, for prompt and answer "
            f"together, is {sampling.total_tokens}.",
            prompt_tokens,
            sampling.total_tokens - 1,
        )
    return min(left, sampling.max_tokens or left)


def _too_long(
    admitted: Admitted, field: str, limit: AnswerLimit, prompt_tokens: int, answered_tokens: int
) -> InvalidField:
    if limit.reason == LengthLimit.EPISODE:
        return InvalidField(
            Code.PROMPT_TOO_LONG,
            field,
            f"The answers of this conversation have {answered_tokens} tokens, but the job's max_response_length "
            f"for all of them is {admitted.job.rollout.max_response_length}: end the episode, or raise the limit.",
        )
    tokens_max = admitted.tokens_max
    return PromptTooLong(
        field,
        f"This model's maximum context length is {tokens_max} tokens. However, your messages resulted in "
        f"{prompt_tokens} tokens. Please reduce the length of the messages.",
        prompt_tokens,
        tokens_max,
    )


def answer_constraint(
    admitted: Admitted, request: CompletionRequest, prompt: bytes
) -> tuple[Constraint | None, tuple[Unsupported, ...]]:
    """Return the constraint on the answer to a prompt (int32), if any, and the demands that are not met. Pure."""
    renderer, why = admitted.model.renderer, ""
    if request.demands:
        why = why_unconstrained(admitted.job.rollout, admitted.type, admitted.constrains)
        why = why or why_not_held(request, renderer)
        if not why:
            return constraint_of(request, renderer, prompt), ()
    unmet = [Unsupported(demand.field, why) for demand in request.demands]
    if request.one_call and request.parse_tool_calls and not renderer.calls_come_singly:
        unmet.append(Unsupported(request.one_call, _LISTED))
    return None, tuple(unmet)


def sampling_params(
    admitted: Admitted, request: CompletionRequest, limit: AnswerLimit
) -> tuple[SamplingParams, tuple[str, ...]]:
    """Return how the request's tokens are drawn, and the names of the request's parameters that are not obeyed. Pure.

    Raises `InvalidField` for parameters that the job refuses.
    """
    check_sampled(request.n, limit.tokens, request.top_logprobs)
    decision = decide(request, admitted.job.rollout, admitted.type, admitted.episode)
    sampling = decision.sampling
    capped = sampling.max_tokens is not None and sampling.max_tokens > limit.tokens
    params = SamplingParams(
        max_tokens=limit.tokens,
        temperature=admitted.job.rollout.temperature if sampling.temperature is None else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        seed=sampling.seed,
        stop_token_ids=_stop_tokens(admitted.model, request),
        top_logprobs=request.top_logprobs,
    )
    return params, (*decision.overridden, request.length_field) if capped else decision.overridden


def _stop_tokens(model: TextModel, request: CompletionRequest) -> tuple[int, ...]:
    own = model.renderer.stop_token_ids
    tokenizer = model.tokenizer
    names = hidden_names(tokenizer, request.stops)
    asked = asked_stops(names, request.stops, request.stop_token_ids, len(tokenizer.pieces))
    return tuple(sorted({*own, *asked})) if asked else own
