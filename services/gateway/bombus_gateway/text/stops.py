"""Finds the tokens that end a completion: those named in the model's files, and those that its template writes."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from bombus.errors import Code, Refused
from bombus.text.chat_template import TemplateRefused
from bombus.text.tokenizer import Tokenizer
from bombus_gateway.text.forms import TOOL, WORD, call_of, common_start, user
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.reading.finding import RenderText

_FIRST, _LAST = f"{WORD}zf", f"{WORD}zl"
_ANSWER: ChatMessage = {"role": "assistant", "content": _LAST}
_RESULT: ChatMessage = {"role": "tool", "tool_call_id": "call_0", "content": "again"}
_REASONING = {"reasoning_content": _FIRST}


def configured_stops(tokenizer: Tokenizer) -> set[int]:
    """Return the ids that end generation according to the model's files."""
    stops: set[int] = set()
    for config in (tokenizer.generation_config, tokenizer.model_config):
        found = config.get("eos_token_id")
        stops.update(found if isinstance(found, list) else [found] if isinstance(found, int) else [])
    named = tokenizer.token_id(tokenizer.named["eos_token"]) if "eos_token" in tokenizer.named else None
    return stops if named is None else stops | {named}


def hidden_names(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[int, str]:
    """Return the names, by id, of the special tokens that are named in stop texts but decode to no text, the longest
    name first."""
    if not texts:
        return {}
    given = "\n".join(texts)
    found = {index: name for index, name in tokenizer.specials.items() if name in given and not tokenizer.pieces[index]}
    return dict(sorted(found.items(), key=lambda item: -len(item[1]))) if found else found


def named_stops(names: Mapping[int, str], texts: Sequence[str]) -> dict[int, str]:
    """Map each token whose name is the beginning of a stop text to the shortest such stop text. `names` is the result
    of `hidden_names`.

    An answer ends at such a token, without waiting for the rest of the stop text.
    """
    if not names:
        return {}
    begun = [(next((i for i, name in names.items() if text.startswith(name)), None), text) for text in texts]
    return {index: text for index, text in sorted(begun, key=lambda each: -len(each[1])) if index is not None}


def asked_stops(names: Mapping[int, str], texts: Sequence[str], tokens: Sequence[int], size: int) -> set[int]:
    """Return the tokens that end an answer according to a client's stop texts and stop tokens.

    `names` is the result of `hidden_names`, and `size` is the size of the vocabulary. Raises `Refused` for a token
    outside the vocabulary.
    """
    if tokens and max(tokens) >= size:
        raise Refused(
            Code.MALFORMED,
            f"{max(tokens)} is not a token id: stop tokens are ids below {size}, the size of the vocabulary.",
        )
    return {*named_stops(names, texts), *tokens}


def find_stops(render: RenderText, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a completion, sorted.

    A token that the template also writes within a turn, such as between reasoning and the answer, does not end a
    completion, unless the model's files name it. If no token ends a turn, the token that begins the next turn ends the
    completion.
    """
    names = {name: index for index, name in tokenizer.specials.items()}
    # Some templates end a turn of calls only if its content is empty text, and some refuse empty text.
    one, two = call_of([_LAST]), call_of([_FIRST, _LAST])
    content = "" if _LAST in _rendered(render, {**one, "content": ""}) else None
    one, two = {**one, "content": content}, {**two, "content": content}
    within = [_before_call(render, one), *(_between(render, {**turn, **_REASONING}) for turn in (_ANSWER, one))]
    ends = _ends(render, names, _ANSWER, user("again"), within)
    ends += _ends(render, names, one, _RESULT, [*within, _between(render, two)])
    return tuple(sorted(configured_stops(tokenizer) | {names[name] for name in ends}))


def _ends(
    render: RenderText, names: Collection[str], turn: ChatMessage, following: ChatMessage, within: Sequence[str]
) -> list[str]:
    """Return a list with the name of the special token that ends a turn. If there is none, return the names of those
    that begin the next turn."""
    ending, continued = _after(render, turn), _after(render, turn, following)
    common = common_start(ending, continued)
    next_turn = continued.removeprefix(common).lstrip()
    found = _last(names, common) or _last(names, ending), [name for name in names if next_turn.startswith(name)]
    outside = ([name for name in each if not any(name in text for text in within)] for each in found)
    return next(filter(None, outside), [])


def _rendered(render: RenderText, *turns: ChatMessage) -> str:
    """Return the rendering of a question and the given turns, or an empty text if the template refuses them."""
    tools = [TOOL] if any("tool_calls" in turn for turn in turns) else []
    try:
        return render([user("look"), *turns], tools, turns[-1]["role"] != "assistant")
    except TemplateRefused:
        return ""


def _after(render: RenderText, *turns: ChatMessage) -> str:
    return _rendered(render, *turns).rpartition(_LAST)[2]


def _between(render: RenderText, turn: ChatMessage) -> str:
    """Return the text that the template writes between the two words of a turn, or an empty text if it drops a word."""
    _, first, rest = _rendered(render, turn).rpartition(_FIRST)
    between, last, _ = rest.partition(_LAST)
    return between if first and last else ""


def _before_call(render: RenderText, call: ChatMessage) -> str:
    """Return the text that the template writes between a prompt and the arguments of the call that answers it."""
    try:
        prompt = render([user("look")], [TOOL], True)
    except TemplateRefused:
        return ""
    text = _rendered(render, call)
    return text.removeprefix(prompt).rpartition(_LAST)[0] if text.startswith(prompt) else ""


def _last(names: Iterable[str], text: str) -> list[str]:
    """Return a list with the name of the last special token in a text, or an empty list if the text contains none."""
    place, _, name = max(((text.rfind(name), len(name), name) for name in names), default=(-1, 0, ""))
    return [name] if place >= 0 else []
