"""Whether a tokenizer is the model's own, from their files alone: with another one a model trains on noise.

What is decisive: no id beyond the model's vocabulary, no vocabulary far above the tokenizer's, ends of sequences that
are special tokens there, and a chat template whose markers are tokens.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from bombus.errors import EngineFault

# Models are padded above their tokenizer, to round numbers or with room for more: by 0.3 % (Qwen 2.5), 0.5 % (gpt-oss)
# or 1.8 % (Phi-2). Another model's tokenizer misses by more, but among tiny ones.
UNUSED_SHARE_MAX = 0.05
UNUSED_MAX_OF_SMALL = 256
ROLES = ("eos", "bos", "pad")
_MARKER = re.compile(r"<[|｜][^<>|｜\s]{1,64}[|｜]>")


def check_fit(files: Mapping[str, bytes], model: str, tokenizer: str) -> None:
    """`files` are the tokenizer's, with the model's config.json and generation_config.json.

    Raises `EngineFault` with one sentence that names the misfit.
    """
    misfit = _misfit(files)
    if misfit:
        whose = f"the tokenizer of {tokenizer!r} is not that of the model {model!r}"
        raise EngineFault(f"{whose}: {misfit}; set model.tokenizer to the model's own")


def _misfit(files: Mapping[str, bytes]) -> str:
    described, config = _read(files, "tokenizer.json"), _read(files, "config.json")
    ids = token_ids(described)
    size = config.get("vocab_size") or _inner(config, "text_config").get("vocab_size")
    if not ids:
        return "its tokenizer.json has no tokens"
    if not isinstance(size, int):
        return ""  # then there is nothing to compare: what the model cannot embed fails when it is loaded
    highest = max(ids, key=lambda token: ids[token])
    if ids[highest] >= size:
        return f"its token {highest!r} has the id {ids[highest]}, and the model's ids end at {size - 1}"
    unused = size - (ids[highest] + 1)
    if unused > max(UNUSED_MAX_OF_SMALL, int(size * UNUSED_SHARE_MAX)):
        return f"it has {ids[highest] + 1} tokens, and the model {size}"
    return _role_misfit(files, ids, config) or _marker_misfit(files, ids)


def token_ids(described: Mapping[str, Any]) -> dict[str, int]:
    """Every token of a tokenizer.json, added ones too, with its id."""
    vocabulary = _inner(described, "model").get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram's: pairs of token and score
        vocabulary = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
    added = {str(token["content"]): int(token["id"]) for token in described.get("added_tokens") or ()}
    return {**vocabulary, **added}


def _role_misfit(files: Mapping[str, bytes], ids: Mapping[str, int], config: Mapping[str, Any]) -> str:
    """An id that ends, begins or pads for the model has to be a special token, though not always the tokenizer's first.

    Models have several ends, and some well-known ones name another special token in config.json than their tokenizer
    does. One of a stranger names a piece of a word.
    """
    text, generation = _read(files, "tokenizer_config.json"), _read(files, "generation_config.json")
    added = _read(files, "tokenizer.json").get("added_tokens") or ()
    specials = {int(token["id"]) for token in added if token.get("special")}
    names = {index: token for token, index in ids.items()}
    for role in ROLES:
        token = _name_of(text.get(f"{role}_token"))
        if token is None:
            continue
        if token not in ids:
            return f"its {role}_token {token!r} is none of its tokens"
        for source, given in (("config.json", config), ("generation_config.json", generation)):
            for index in _ids_of(given.get(f"{role}_token_id")):
                if index not in specials and index != ids[token]:
                    what = repr(names[index]) if index in names else "no token"
                    return (
                        f"the model's {source} has {role}_token_id {index}, which is {what} there, "
                        f"and its {role}_token is {token!r} ({ids[token]})"
                    )
    return ""


def _marker_misfit(files: Mapping[str, bytes], ids: Mapping[str, int]) -> str:
    """Either all markers of a template are tokens, or none is: some models have learned them as plain text."""
    template = files.get("chat_template.jinja", b"").decode("utf-8", "replace")
    template = template or _template_of(_read(files, "tokenizer_config.json").get("chat_template"))
    markers = sorted(set(_MARKER.findall(template)))
    missing = [marker for marker in markers if marker not in ids]
    plain = len(missing) == len(markers) and "<|im_end|>" not in missing
    return "" if plain or not missing else f"its chat template has {missing[0]!r}, which is none of its tokens"


def _template_of(value: object) -> str:
    if isinstance(value, list):  # several, by name
        return next((str(one.get("template", "")) for one in value if one.get("name") == "default"), "")
    return value if isinstance(value, str) else ""


def _name_of(value: object) -> str | None:
    if isinstance(value, Mapping):  # an AddedToken, written out
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _ids_of(value: object) -> tuple[int, ...]:
    if isinstance(value, list):
        return tuple(one for one in value if isinstance(one, int))
    return (value,) if isinstance(value, int) and value >= 0 else ()


def _read(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name) or b"{}")
    except ValueError as error:
        raise EngineFault(f"{name} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _inner(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, Mapping) else {}
