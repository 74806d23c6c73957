"""Checks, from files alone, that a tokenizer belongs to a model: with any other tokenizer, the model trains on noise.

Three conditions are checked: no token id is beyond the model's vocabulary, that vocabulary is not much larger than the
tokenizer's, and the model's end-of-sequence ids are special tokens of the tokenizer. `bombus.text.checking` checks the
chat template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bombus.errors import EngineFault
from bombus.weights.models import TOOL_TEMPLATE

# A model's vocabulary is larger than its tokenizer's, because it is padded to a round number or with spare ids: by 0.3
# % (Qwen 2.5), 0.5 % (gpt-oss) or 1.8 % (Phi-2). The size of another model's tokenizer differs by more, unless both
# models are tiny.
UNUSED_SHARE_MAX = 0.05
UNUSED_MAX_OF_SMALL = 256
ROLES = ("eos", "bos", "pad")


def check_fit(files: Mapping[str, bytes], model: str, tokenizer: str) -> None:
    """Raise `EngineFault`, with one sentence that says what does not fit, unless the tokenizer fits the model.

    `files` are the tokenizer's files, and the model's config.json and generation_config.json. If the tokenizer comes
    from the model's own folder, only the end-of-sequence id is compared: the ids of the other two roles are not used,
    and many fine-tuned models still have outdated ones in their own files.
    """
    own = tokenizer == model
    misfit = _misfit(files, ("eos",) if own else ROLES)
    if misfit and own:
        todo = "correct its files, or set model.tokenizer to another one"
        raise EngineFault(f"the tokenizer in {model!r} does not fit the model there: {misfit}; {todo}")
    if misfit:
        whose = f"the tokenizer of {tokenizer!r} does not fit the model {model!r}"
        raise EngineFault(f"{whose}: {misfit}; set model.tokenizer to the model's own")


def _misfit(files: Mapping[str, bytes], compared: Sequence[str]) -> str:
    """Return a clause that says what does not fit, or "" if everything fits."""
    described, config = read_json(files, "tokenizer.json"), read_json(files, "config.json")
    ids = token_ids(described)
    size = config.get("vocab_size") or _inner(config, "text_config").get("vocab_size")
    if not ids:
        return "its tokenizer.json has no tokens"
    if not isinstance(size, int):
        return ""  # the size is unknown; ids that the model cannot embed fail when it is loaded
    highest = max(ids, key=lambda token: ids[token])
    if ids[highest] >= size:
        return f"its token {highest!r} has the id {ids[highest]}, but the model's ids end at {size - 1}"
    unused = size - (ids[highest] + 1)
    if unused > max(UNUSED_MAX_OF_SMALL, int(size * UNUSED_SHARE_MAX)):
        return f"it has {ids[highest] + 1} tokens, but the model has {size}"
    return _role_misfit(files, ids, config, compared)


def token_ids(described: Mapping[str, Any]) -> dict[str, int]:
    """Return every token of a tokenizer.json with its id, including added tokens."""
    vocabulary = _inner(described, "model").get("vocab") or {}
    if isinstance(vocabulary, list):  # a Unigram model's pairs of token and score
        vocabulary = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
    added = {str(token["content"]): int(token["id"]) for token in described.get("added_tokens") or ()}
    return {**vocabulary, **added}


def _role_misfit(
    files: Mapping[str, bytes], ids: Mapping[str, int], config: Mapping[str, Any], compared: Sequence[str]
) -> str:
    """Return which role's token the tokenizer lacks, or which of the model's ids for a `compared` role is not special.

    The tokenizer may have a different special token for the role: models have several end-of-sequence tokens, and for
    some well-known models, config.json and the tokenizer name different ones. In the tokenizer of a different model,
    the model's id usually belongs to a part of a word.
    """
    text, generation = read_json(files, "tokenizer_config.json"), read_json(files, "generation_config.json")
    added = read_json(files, "tokenizer.json").get("added_tokens") or ()
    specials = {int(token["id"]) for token in added if token.get("special")}
    names = {index: token for token, index in ids.items()}
    sources = (("config.json", config), ("generation_config.json", generation))
    for role in ROLES:
        token = _name_of(text.get(f"{role}_token"))
        if token is None:
            continue
        if token not in ids:
            return f"its {role}_token {token!r} is not one of its tokens"
        named = [(source, index) for source, given in sources for index in _ids_of(given.get(f"{role}_token_id"))]
        for source, index in named if role in compared else ():
            if index not in specials and index != ids[token]:
                what = repr(names[index]) if index in names else "no token"
                return (
                    f"the model's {source} has {role}_token_id {index}, which is {what} in the tokenizer, "
                    f"whose {role}_token is {token!r} ({ids[token]})"
                )
    return ""


def template_sources(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the chat templates in a model's files, keyed by "default", and "tool_use" for conversations with tools."""
    in_files = {"default": "chat_template.jinja", "tool_use": TOOL_TEMPLATE}
    found = {name: files[file].decode("utf-8", "replace") for name, file in in_files.items() if file in files}
    given = read_json(files, "tokenizer_config.json").get("chat_template")
    if found or isinstance(given, str):
        return found or {"default": str(given)}
    listed = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    return {str(each.get("name")): str(each.get("template")) for each in listed}


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty object if the file is missing. Raises `EngineFault` if it is not
    JSON."""
    try:
        found = json.loads(files.get(name) or b"{}")
    except ValueError as error:
        raise EngineFault(f"{name} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _name_of(value: object) -> str | None:
    if isinstance(value, Mapping):  # an AddedToken as JSON
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _ids_of(value: object) -> tuple[int, ...]:
    if isinstance(value, list):
        return tuple(one for one in value if isinstance(one, int))
    return (value,) if isinstance(value, int) and value >= 0 else ()


def _inner(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, Mapping) else {}
