"""What a server elsewhere lacks for training, found out by asking it a few tokens."""

import logging
from pathlib import Path

import httpx
import msgspec
from tokenizers import Tokenizer

from bombus.errors import Refused
from bombus.hive.generation import Generate
from bombus.hive.records import SamplingParams, pack_tokens
from bombus_inference.backends.http_calls import BackendFailed
from bombus_inference.backends.openai.servers import Server
from bombus_inference.backends.openai.wire import ServerChoice

log = logging.getLogger(__name__)

TEXT = "The capital of France is"
TOKENS = 16
GAP_MIN = 1e-3  # between the two likeliest: with less, two temperatures cannot be told apart

RAW = (
    "its logprobs are of the model's own distribution and not of the one that it samples from "
    "(vLLM has --logprobs-mode processed_logprobs)"
)


async def find_missing(server: Server, folder: Path, vocabulary: int) -> list[str]:
    """What it lacks to serve the model in `folder`, in words that follow "this server lacks what training needs:"."""
    tokenizer = _tokenizer(folder)
    prompt = [0] if tokenizer is None else tokenizer.encode(TEXT, add_special_tokens=False).ids
    try:
        greedy = await _ask(server, prompt, temperature=0.0, tokens=TOKENS)
        missing = _missing(greedy)
        if missing:
            return missing
        plain = await _ask(server, prompt, temperature=1.0)
        hot = await _ask(server, prompt, temperature=2.0)
    except (BackendFailed, Refused, httpx.HTTPError, msgspec.MsgspecError) as error:
        return [f"it does not continue a prompt of token ids ({str(error) or type(error).__name__})"]
    found = []
    if _is_raw(plain, hot):
        found.append(RAW)
    if not _speaks(tokenizer, vocabulary, greedy):
        found.append("its vocabulary is not that of the run's model")
    return found


async def _ask(server: Server, prompt: list[int], temperature: float, tokens: int = 1) -> ServerChoice:
    sampling = SamplingParams(max_tokens=tokens, temperature=temperature, top_logprobs=2)
    request = Generate(id="probe", engine="", run=0, prompt=pack_tokens(prompt), sampling=sampling)
    seen = [one async for some in server.ask(request, prompt, len(prompt) + tokens) for one in some]
    if not seen:
        raise BackendFailed("it answers with no choice")
    return seen[0]


def _missing(seen: ServerChoice) -> list[str]:
    found = []
    if seen.tokens is None:
        found.append("it returns no token ids")
    if seen.logprobs is None:
        found.append("it returns no logprobs")
    if not found and len(seen.tokens or ()) != len(seen.logprobs or ()):
        found.append("it does not return one logprob for each token")
    return found


def _is_raw(plain: ServerChoice, hot: ServerChoice) -> bool:
    """At twice the temperature the likeliest two are half as far apart, if the logprobs are of what is sampled from."""
    gap, hot_gap = _gap(plain), _gap(hot)
    return gap > GAP_MIN and abs(hot_gap - gap) < abs(hot_gap - gap / 2)


def _gap(seen: ServerChoice) -> float:
    """Of the two likeliest first tokens, in nats; 0 where they are not told."""
    first = sorted((logprob for _, logprob in seen.tops[0]), reverse=True)[:2] if seen.tops else []
    return first[0] - first[1] if len(first) == 2 else 0.0


def _speaks(tokenizer: Tokenizer | None, vocabulary: int, seen: ServerChoice) -> bool:
    """Whether its ids are the words that it says they are. A server without a tokenizer says none, and is believed."""
    tokens = list(seen.tokens or ())
    if any(not 0 <= token < vocabulary for token in tokens):
        return False
    if tokenizer is None or not seen.text:
        return True
    return _plain(tokenizer.decode(tokens, skip_special_tokens=False)) == _plain(seen.text)


def _plain(text: str) -> str:
    """Without what detokenizers differ in: white space, and half characters at the end."""
    return "".join(text.replace("\ufffd", "").split())


def _tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None
