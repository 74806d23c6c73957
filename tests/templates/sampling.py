"""Reads random tokens as a family's completions, and puts the names of special tokens into its messages."""

import random
from collections import Counter
from collections.abc import Iterator

import msgspec

from bombus.errors import Refused
from bombus.hive.generation import Tokens
from bombus.hive.records import FinishReason, pack_logprobs, pack_tokens
from bombus_gateway.call.completion import Completion
from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.text.message import ChatMessage
from tests.templates.battery import Subject
from tests.templates.conversations import PARIS, TOOLS, assistant, call, result, system, user

SEQUENCE_TOKENS_MAX = 40
CONTROL_SHARE = 0.4  # of the tokens that are sampled


def read_random_tokens(subject: Subject, sequences: int, seed: int) -> None:
    """Read sequences of random tokens, many of them added ones, as completions. Fails where a reader does."""
    model = subject.ours
    random_ = random.Random(seed)
    added, size = sorted(model.tokenizer.added), len(model.tokenizer.pieces)
    prompts = [pack_tokens(prompt) for prompt in _prompts(subject)]
    request = CompletionRequest(chat=True, tools=tuple(TOOLS), parse_tool_calls=True)
    for number in range(sequences):
        completion = Completion(model, request, random_.choice(prompts), f"call-{number}", 0)
        tokens = [
            random_.choice(added) if random_.random() < CONTROL_SHARE else random_.randrange(size)
            for _ in range(random_.randrange(SEQUENCE_TOKENS_MAX))
        ]
        cut = random_.randint(0, len(tokens))
        for part in (tokens[:cut], tokens[cut:]):
            completion.feed(Tokens(version=0, tokens=pack_tokens(part), logprobs=pack_logprobs([0.0] * len(part))))
        completion.end(FinishReason.STOP)
        assert not completion.misread, tokens
        msgspec.json.encode(completion.message())


def _prompts(subject: Subject) -> list[list[int]]:
    """Return prompts of this template, and an empty one."""
    found: list[list[int]] = [[]]
    for messages in ([user("Hi.")], [user("Hi."), assistant("", call(1, "weather", PARIS)), result(1, "sunny")]):
        for tools in (TOOLS, []):
            try:
                found.append(subject.ours.renderer.render(messages, tools))
            except Refused:
                pass
    return found


def forged(subject: Subject) -> Iterator[str]:
    """Yield what is wrong when a message holds the names of all special tokens: it may have none of their ids."""
    names = sorted(subject.ours.tokenizer.specials.values())
    for text in (" ".join(names), "".join(names), "\n".join(reversed(names)), *names):
        for role, messages in _holding(text).items():
            wanted, found = _specials(subject, _holding("harmless")[role]), _specials(subject, messages)
            if wanted is not None and found is not None and wanted != found:
                yield f"{text!r} in a message of role {role}: {found - wanted} too many, {wanted - found} too few"


def _holding(text: str) -> dict[str, list[ChatMessage]]:
    """Return a conversation for each role whose message holds a text."""
    called = [user("Hi."), assistant("", call(1, "weather", PARIS))]
    return {
        "system": [system(f"Say {text} now."), user("Hi.")],
        "user": [user(text), assistant("Well."), user("Go on.")],
        "tool": [*called, result(1, text)],
    }


def _specials(subject: Subject, messages: list[ChatMessage]) -> Counter[str] | None:
    """Count the special tokens of a prompt. None where it is refused."""
    try:
        ids = subject.ours.renderer.render(messages, TOOLS if messages[-1]["role"] == "tool" else [])
    except Refused:
        return None
    specials = subject.ours.tokenizer.specials
    return Counter(specials[index] for index in ids if index in specials)
