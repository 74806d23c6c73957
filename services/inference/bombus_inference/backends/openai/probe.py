"""Finds out what an external server lacks for training by having it generate a few tokens."""

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
GAP_MIN = 1e-3  # nats between the two most likely tokens; a smaller gap cannot show the temperature

RAW = (
    "its logprobs are those of the model's own distribution, not of the distribution that it samples from "
    "(vLLM has --logprobs-mode processed_logprobs)"
)


async def find_missing(server: Server, folder: Path, vocabulary: int) -> list[str]:
    """Return what the server lacks for serving the model in `folder`, as clauses that begin with "it" or "its"."""
    tokenizer = _tokenizer(folder)
    prompt = [0] if tokenizer is None else tokenizer.encode(TEXT, add_special_tokens=False).ids
    try:
        greedy = await _first_choice(server, prompt, temperature=0.0, tokens=TOKENS)
        missing = _missing(greedy)
        if missing:
            return missing
        plain = await _first_choice(server, prompt, temperature=1.0)
        hot = await _first_choice(server, prompt, temperature=2.0)
    except (BackendFailed, Refused, httpx.HTTPError, msgspec.MsgspecError) as error:
        return [f"it does not continue a prompt of token ids ({str(error) or type(error).__name__})"]
    found = []
    if _is_raw(plain, hot):
        found.append(RAW)
    if not _uses_vocabulary(tokenizer, vocabulary, greedy):
        found.append("its vocabulary differs from that of the run's model")
    return found


async def _first_choice(server: Server, prompt: list[int], temperature: float, tokens: int = 1) -> ServerChoice:
    sampling = SamplingParams(max_tokens=tokens, temperature=temperature, top_logprobs=2)
    request = Generate(id="probe", engine="", run=0, prompt=pack_tokens(prompt), sampling=sampling)
    found = [one async for choices in server.generate(request, prompt, len(prompt) + tokens) for one in choices]
    if not found:
        raise BackendFailed("its answer contains no choice")
    return found[0]


def _missing(choice: ServerChoice) -> list[str]:
    found = []
    if choice.tokens is None:
        found.append("it returns no token ids")
    if choice.logprobs is None:
        found.append("it returns no logprobs")
    if not found and len(choice.tokens or ()) != len(choice.logprobs or ()):
        found.append("it does not return one logprob for each token")
    return found


def _is_raw(plain: ServerChoice, hot: ServerChoice) -> bool:
    """Return whether the logprobs are the model's own, not those of the distribution that tokens are sampled from.

    If they came from the sampling distribution, doubling the temperature would halve the gap between the two most
    likely tokens.
    """
    gap, hot_gap = _gap(plain), _gap(hot)
    return gap > GAP_MIN and abs(hot_gap - gap) < abs(hot_gap - gap / 2)


def _gap(choice: ServerChoice) -> float:
    """Return the gap, in nats, between the two most likely first tokens, or 0 if they are not reported."""
    first = sorted((logprob for _, logprob in choice.tops[0]), reverse=True)[:2] if choice.tops else []
    return first[0] - first[1] if len(first) == 2 else 0.0


def _uses_vocabulary(tokenizer: Tokenizer | None, vocabulary: int, choice: ServerChoice) -> bool:
    """Return whether the choice's token ids decode to its text. Without a tokenizer, or without text, check only
    whether the ids are in the vocabulary."""
    tokens = list(choice.tokens or ())
    if any(not 0 <= token < vocabulary for token in tokens):
        return False
    if tokenizer is None or not choice.text:
        return True
    return _plain(tokenizer.decode(tokens, skip_special_tokens=False)) == _plain(choice.text)


def _plain(text: str) -> str:
    """Return the text without white space and incomplete characters, which detokenizers treat differently."""
    return "".join(text.replace("\ufffd", "").split())


def _tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None
