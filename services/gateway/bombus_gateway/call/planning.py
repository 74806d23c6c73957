"""The plan of a call: the stored conversation that it continues, its prompt as tokens, and its sampling parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from bombus.errors import Code, Refused
from bombus.hive.records import SamplingParams, pack_tokens
from bombus_gateway.call.admission import Admitted, Room
from bombus_gateway.call.conversation import prefix_digests, root_digest
from bombus_gateway.call.histories import Histories, Match
from bombus_gateway.call.request import CallRequest
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


async def plan_call(request: CallRequest, admitted: Admitted, histories: Histories) -> CallPlan:
    """Find what the request continues, and render the rest of its prompt.

    Raises `Refused` when the prompt is too long, or when earlier turns cannot be read.
    """
    completion = request.completion
    if completion.chat:
        prompt = await _chat_prompt(request, admitted.model, histories)
    else:
        prompt = _plain_prompt(request, admitted.model, histories)
    answered = any(message["role"] == "assistant" for message in completion.messages)
    node = prompt.match.node
    before = node.sampled if node is not None else 0
    room = admitted.room(completion, prompt.count, before, is_first=node is None and not answered)
    return CallPlan(admitted.model, prompt, admitted.sampling(completion, room), room)


async def _chat_prompt(request: CallRequest, model: TextModel, histories: Histories) -> Prompt:
    tools, variables = request.completion.tools, request.completion.chat_template_kwargs
    renderer = model.renderer.given(variables)
    sent = request.completion.messages  # as the log has them
    digests = prefix_digests(root_digest(tools, variables), sent)
    match = await histories.match(request.claims, sent, digests, request.traceparent)
    messages = renderer.adapted(sent)
    node = match.node
    if node is not None:
        tail = renderer.extend(node.tokens, node.completion_at, messages, match.count, tools)
        if tail is not None:
            packed = pack_tokens(tail)
            return Prompt(node.tokens + packed, len(packed), match, digests)
        # The model's template drops part of what was sampled (reasoning): the call begins a branch of its own.
    tokens = pack_tokens(renderer.render(messages, tools))
    return Prompt(tokens, len(tokens), Match(), digests)


def _plain_prompt(request: CallRequest, model: TextModel, histories: Histories) -> Prompt:
    prompt = request.completion.prompt
    if isinstance(prompt, str):
        tokens = pack_tokens(model.tokenizer.encode(prompt))
    elif max(prompt) >= len(model.tokenizer.pieces):
        raise Refused(Code.MALFORMED, f"prompt holds token {max(prompt)}, which is outside the vocabulary.")
    else:
        tokens = pack_tokens(prompt)
    node = histories.conversation(request.claims).longest_tokens(tokens)
    return Prompt(tokens, len(tokens) - (len(node.tokens) if node is not None else 0), Match(0, node))
