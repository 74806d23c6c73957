"""The plan of a call: the stored conversation that it continues, its prompt as tokens, and its sampling parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bombus.errors import Code, Refused
from bombus.hive.records import SamplingParams, pack_tokens
from bombus_gateway.call.admission import Admitted, Room
from bombus_gateway.call.conversation import Conversation, prefix_digests, root_digest
from bombus_gateway.call.histories import Histories, Match
from bombus_gateway.call.request import CallRequest, CompletionRequest
from bombus_gateway.call.workers import Workers
from bombus_gateway.text.rendering import TextModel


@dataclass(frozen=True)
class Prompt:
    """What the model reads.

    `tokens` is int32; its last `tail` bytes are new, what comes before is `match`'s. `digests` has the digest of each
    prefix of the messages, and is empty for a plain completion.
    """

    tokens: bytes
    tail: int
    match: Match
    digests: Sequence[bytes] = ()

    @property
    def count(self) -> int:
        """The number of tokens."""
        return len(self.tokens) // 4


@dataclass(frozen=True)
class CallPlan:
    """What will be generated. `room` is that of each choice."""

    model: TextModel
    prompt: Prompt
    sampling: SamplingParams
    room: Room


async def plan_call(request: CallRequest, admitted: Admitted, histories: Histories, workers: Workers) -> CallPlan:
    """Find what the request continues, and render the rest of its prompt, in a thread where it is large.

    Raises `Refused` when the prompt is too long, or when earlier turns cannot be read.
    """
    completion = request.completion
    admitted.check_characters(completion, request.body_bytes)
    if completion.chat:
        prompt = await _chat_prompt(request, admitted.model, histories, workers)
    else:
        plain = partial(_plain_prompt, request, admitted.model, histories.conversation(request.claims))
        prompt = await workers.run(request.body_bytes, plain)
    answered = any(message["role"] == "assistant" for message in completion.messages)
    node = prompt.match.node
    before = node.sampled if node is not None else 0
    room = admitted.room(completion, prompt.count, before, is_first=node is None and not answered)
    return CallPlan(admitted.model, prompt, admitted.sampling(completion, room), room)


async def _chat_prompt(request: CallRequest, model: TextModel, histories: Histories, workers: Workers) -> Prompt:
    completion, size = request.completion, request.body_bytes
    digests = await workers.run(size, partial(_digests, completion))
    match = await histories.match(request.claims, completion.messages, digests, request.traceparent)
    return await workers.run(size, partial(_rendered, completion, model, match, digests))


def _digests(completion: CompletionRequest) -> list[bytes]:
    return prefix_digests(root_digest(completion.tools, completion.chat_template_kwargs), completion.messages)


def _rendered(completion: CompletionRequest, model: TextModel, match: Match, digests: Sequence[bytes]) -> Prompt:
    renderer, tools = model.renderer.given(completion.chat_template_kwargs), completion.tools
    messages = renderer.adapted(completion.messages)
    node = match.node
    if node is not None:
        tail = renderer.extend(node.tokens, node.completion_at, messages, match.count, tools)
        if tail is not None:
            packed = pack_tokens(tail)
            return Prompt(node.tokens + packed, len(packed), match, digests)
        # The model's template drops part of what was sampled (reasoning): the call begins a branch of its own.
    tokens = pack_tokens(renderer.render(messages, tools))
    return Prompt(tokens, len(tokens), Match(), digests)


def _plain_prompt(request: CallRequest, model: TextModel, conversation: Conversation) -> Prompt:
    prompt = request.completion.prompt
    if isinstance(prompt, str):
        tokens = pack_tokens(model.tokenizer.encode(prompt))
    elif max(prompt) >= len(model.tokenizer.pieces):
        raise Refused(Code.MALFORMED, f"prompt holds token {max(prompt)}, which is outside the vocabulary.")
    else:
        tokens = pack_tokens(prompt)
    node = conversation.longest_tokens(tokens)
    return Prompt(tokens, len(tokens) - (len(node.tokens) if node is not None else 0), Match(0, node))
