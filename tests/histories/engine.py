"""The scripted model: it samples tokens of its own for each prompt, and remembers them, with their logprobs."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from bombus.hive.generation import Finished, Generate, Tokens
from bombus.hive.records import pack_logprobs, pack_tokens, unpack_tokens
from tests.gateway.openai_hive import Died, Send
from tests.histories.answers import Plan, plan
from tests.histories.model import END, TEXT, sampled_tokens

UNIT = 1 / 1024  # logprobs are multiples of it, each used once, so that a float32 tells which token it belongs to
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
CODE = "Write code in <code> tags."  # in the system's text of an agent that stops at a string


@dataclass(frozen=True)
class Generation:
    """What one call was asked and what was sampled for it. `sent` counts the tokens that have left for the gateway."""

    prompt: tuple[int, ...]
    plan: Plan
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str


@dataclass
class Mind:
    """The model in one episode: the answer follows from the seed, the prompt, and how often it was asked before."""

    seed: int
    generations: dict[str, Generation] = field(default_factory=dict)  # by the id of the call
    slow: bool = False  # sends its frames one by one, so that a client can hang up in between
    _asked: Counter[bytes] = field(default_factory=Counter)
    _sampled: int = 0

    def answer(self, request: Generate) -> tuple[Generation, Sequence[int]]:
        """Return what is sampled, and where its frames end."""
        prompt = unpack_tokens(request.prompt)
        name = blake2b(request.prompt, digest_size=8).digest()
        self._asked[name] += 1
        again = self._asked[name]
        said = random.Random(f"{self.seed}/{name.hex()}")
        if said.random() < 0.5 and again > 1:
            said = random.Random(f"{self.seed}/{name.hex()}/{again}")  # another text than before
        chance = random.Random(f"{self.seed}/{name.hex()}/{again}/tokens")
        text = TEXT.tokenizer.decode(prompt)
        made = plan(said, _tools_in(text), CODE in text)
        tokens = sampled_tokens(made.written(), chance)
        finish = "stop"
        if made.cut:
            tokens, finish = tokens[: max(1, len(tokens) * made.cut // 1000)], "length"
        else:
            tokens.append(END)
        if len(tokens) > request.sampling.max_tokens:
            tokens, finish = tokens[: request.sampling.max_tokens], "length"
        logprobs = [-UNIT * (self._sampled + number) for number in range(1, len(tokens) + 1)]
        self._sampled += len(tokens)
        generation = Generation(tuple(prompt), made, tuple(tokens), tuple(logprobs), finish)
        self.generations[request.id] = generation
        return generation, _ends(chance, len(tokens), request.stream)


class Engine:
    """A script for the replica that answers for all episodes."""

    def __init__(self) -> None:
        self.minds: dict[str, Mind] = {}  # by episode

    async def sample(self, request: Generate, send: Send) -> None:
        mind = self.minds[request.episode]
        generation, ends = mind.answer(request)
        try:
            await self._send(mind, generation, ends, send)
        except (Died, ConnectionError):  # the gateway has closed the connection: it needs no more
            return

    async def _send(self, mind: Mind, generation: Generation, ends: Sequence[int], send: Send) -> None:
        start = 0
        for end in ends:
            if mind.slow:
                await asyncio.sleep(0.002)
            part = slice(start, end)
            tokens, logprobs = pack_tokens(generation.tokens[part]), pack_logprobs(generation.logprobs[part])
            await send(Tokens(version=0, tokens=tokens, logprobs=logprobs))
            start = end
        await send(Finished(reason=generation.finish))


def _tools_in(prompt: str) -> list[str]:
    """Return the names of the tools that a prompt describes."""
    described = _TOOLS.search(prompt)
    lines = described[1].splitlines() if described else []
    return [json.loads(line)["function"]["name"] for line in lines]


def _ends(chance: random.Random, count: int, stream: bool) -> list[int]:
    """Return where frames end: anywhere in a stream, and all tokens in one frame otherwise."""
    inner = chance.sample(range(1, count), min(count - 1, chance.randint(0, 5))) if stream and count > 1 else []
    return [*sorted(inner), count]
