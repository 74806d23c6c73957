"""Reads and writes job documents: AgentJet's YAML (`ajet:`), verl's and xorl's keys, and our own block (`bombus:`).

A mistake in a document raises `Refused(BAD_CONFIG)`, which names the field, the value and the allowed range.
"""

import json
import re
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

from bombus.config import agentjet, xorl
from bombus.config.groups import Tree, bad_config, shown
from bombus.config.job import GROUPS, RolloutConfig, RunConfig, validated
from bombus.config.learning import why_nothing_is_learnt
from bombus.config.slime import from_slime
from bombus.errors import Code, Refused

__all__ = [
    "LENGTHS",
    "RunConfig",
    "Tree",
    "derive_lengths",
    "no_effect",
    "own_groups",
    "parse_job",
    "read_document",
    "read_job_file",
    "to_yaml",
]

JOB_BYTES_MAX = 256 << 10

BLOCKS = ("ajet", "bombus", "hydra", "defaults")  # the keys at the top of a document; the last two are Hydra's
LENGTHS = ("max_prompt_length", "max_response_length", "max_response_length_in_one_turn", "max_model_len")


def parse_job(document: str | Mapping[str, Any]) -> RunConfig:
    """Return the configuration in a document, given as YAML or JSON text or as the parsed mapping.

    Keys below `ajet` are AgentJet's, and verl's keys may be used next to them. A document that has neither may have
    xorl's keys at the top level. The groups below `bombus` use our own names and take precedence; `trainer` accepts
    slime's names too. Any of the four lengths may be given; the others are derived. Raises `Refused(BAD_CONFIG)`.
    """
    tree = read_document(document) if isinstance(document, str) else _plain_tree(document, "the job")
    given, names, ignored = agentjet.read(tree)
    known = (*BLOCKS, *agentjet.VERL_TOPS)
    ignored += [str(key) for key in tree if key not in known] if agentjet.has_keys(tree) else []
    flat, flat_names, without_effect = xorl.read(_flat_keys(tree))
    xorl.put(flat, given)
    names |= flat_names
    ignored += without_effect
    _check_model_is_named(flat, tree.get("bombus"))
    for group, fields in _own_block(tree.get("bombus")).items():
        plain = {field: (value, field) for field, value in fields.items()}
        for field, (value, option) in (from_slime(fields) if group == "trainer" else plain).items():
            given.setdefault(group, {})[field] = value
            names[f"{group}.{field}"] = f"bombus.{group}.{option}"
    _derive_lengths(given.setdefault("rollout", {}))
    config = validated(given, names)
    _check_it_can_learn(config, names)
    return config.ignoring(ignored)


def _check_it_can_learn(job: RunConfig, names: Mapping[str, str]) -> None:
    path, why = why_nothing_is_learnt(job)
    if path:
        group, _, field = path.partition(".")
        value = getattr(getattr(job, group), field)
        raise bad_config(f"{names.get(path, f'bombus.{path}')} = {value} is refused: {why}")


def no_effect(key: str) -> str:
    """Return a sentence saying that a key of a job has no effect, and why or what to use instead."""
    why = agentjet.IGNORED.get(key) or xorl.IGNORED.get(key)
    return f"{key} of the job has no effect" + (f": {why}" if why else "")


def _flat_keys(tree: Mapping[str, Any]) -> Tree:
    """Return xorl's keys at the top level of a document. A document with AgentJet's or verl's keys has none."""
    return {} if agentjet.has_keys(tree) else {str(key): value for key, value in tree.items() if key not in BLOCKS}


def _check_model_is_named(flat: Mapping[str, object], own: object) -> None:
    """Raise `Refused` if there are flat keys but no model is named: xorl has no default model."""
    named = isinstance(own, Mapping) and isinstance(own.get("model"), Mapping) and "path" in own["model"]
    if flat and "model.path" not in flat and not named:
        raise bad_config("model_path is missing: it names the model to train")


def own_groups(tree: Mapping[str, Any]) -> Tree:
    """Return the groups of a document's own block, filled in from xorl's flat keys and verl's. Raises
    `Refused(BAD_CONFIG)`."""
    groups: Tree = agentjet.read({key: {} if key == "ajet" else value for key, value in tree.items()})[0]
    xorl.put(xorl.read(_flat_keys(tree))[0], groups)
    for group, fields in _own_block(tree.get("bombus")).items():
        groups.setdefault(group, {}).update(fields)
    return groups


def read_document(text: str, name: str = "the job") -> Tree:
    """Parse YAML or JSON text into a mapping. JSON needs no library; other YAML needs the extra `bombus[yaml]`.

    YAML with anchors, aliases or merge keys is refused (see `plain_yaml`).

    Raises `Refused(BAD_CONFIG)`, or `Refused(TOO_LARGE)` if the text is longer than `JOB_BYTES_MAX`; both refer to the
    document as `name`.
    """
    if len(text) > JOB_BYTES_MAX:
        raise Refused(Code.TOO_LARGE, f"{name}: {len(text)} characters exceed the limit of {JOB_BYTES_MAX}")
    try:
        tree = _plain(_json_or_yaml(text, name), name, "")
        json.dumps(tree, ensure_ascii=False).encode()  # raises for lone surrogates
    except (ValueError, OverflowError, RecursionError) as error:  # an impossible date, or brackets nested too deeply
        raise bad_config(f"{name}: it cannot be read as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise bad_config(
            f"{name} must be a mapping: a job has `ajet:`, `bombus:` or xorl's keys such as `model_path:` at its top, "
            "a cluster file has `engines:`"
        )
    return tree


def _plain_tree(tree: Mapping[str, Any], name: str) -> Tree:
    try:
        return {_text_key(key, name, ""): _plain(value, name, str(key)) for key, value in tree.items()}
    except RecursionError:
        raise bad_config(f"{name}: it is nested too deeply, or contains itself") from None


def _plain(value: object, name: str, place: str) -> object:
    """Return a value with all keys as strings. Raises `Refused(BAD_CONFIG)` for a type that JSON does not have."""
    if isinstance(value, Mapping):
        inside = f"{place}." if place else ""
        return {
            (text := _text_key(key, name, place)): _plain(each, name, f"{inside}{text}") for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(each, name, f"{place}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, date | time | bytes | bytearray | set | frozenset | complex):
        what = "a date or a time" if isinstance(value, date | time) else f"of type {type(value).__name__}"
        raise bad_config(f"{name}: {place or 'it'} is {what}; use a string in quotes, a number, a list or a mapping")
    return value


def _text_key(key: object, name: str, place: str) -> str:
    """Return a key as a string, since YAML keys may also be numbers and other values."""
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, int | float):
        return str(key)
    why = f"has a key of type {type(key).__name__}, but keys must be strings: put it in quotes"
    raise bad_config(f"{name}: {place or 'it'} {why}")


def _json_or_yaml(text: str, name: str) -> object:
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            pass  # a YAML flow mapping may start with a brace too
    try:
        import yaml

        from bombus.config import plain_yaml
    except ImportError:
        raise bad_config("reading YAML needs PyYAML: pip install 'bombus[yaml]', or give the job as JSON") from None
    try:
        return plain_yaml.load(text)
    except yaml.YAMLError as error:
        raise bad_config(_syntax_error(text, name, error)) from error


def _syntax_error(text: str, name: str, error: Exception) -> str:
    """Return where and why a text is not valid YAML, on one line; PyYAML's own message may take eight."""
    mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None:  # a character that YAML does not allow
        before = text[: getattr(error, "position", 0)]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        why = f"the character {text[len(before) : len(before) + 1]!r} is not allowed"
    else:
        line, column = mark.line + 1, mark.column + 1
    why = str(why).replace("'<stream end>'", "the end")
    if "<block " in why:  # PyYAML's name for lines with the same indentation
        why = "this line does not fit the indentation of those above it"
    return f"{name}, line {line}, column {column}: {why}"


def _own_block(tree: object) -> dict[str, Mapping[str, object]]:
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise bad_config(f"bombus must be a mapping of {', '.join(GROUPS)}, not {shown(tree)}")
    block: dict[str, Mapping[str, object]] = {}
    for group, fields in tree.items():
        if group not in GROUPS:
            raise bad_config(f"bombus.{group} is unknown; the groups are {', '.join(GROUPS)}")
        if not isinstance(fields, Mapping):
            raise bad_config(f"bombus.{group} must be a mapping, not {shown(fields)}")
        block[group] = fields
    return block


def _derive_lengths(rollout: Tree) -> None:
    """Fill in the lengths that were not given from those that were."""
    given = {name: rollout[name] for name in LENGTHS if type(rollout.get(name)) is int}
    if not given or any(name in rollout and name not in given for name in LENGTHS):
        return
    rollout.update(derive_lengths(given))


def derive_lengths(given: Mapping[str, int], base: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return all four lengths: those `given` unchanged, the others from `base` (or the defaults), adjusted to fit.

    Lengths that do not fit together are returned as they are, and refused when the configuration is validated.
    """
    base = base or {name: RolloutConfig.model_fields[name].default for name in LENGTHS}
    turn = given.get("max_response_length_in_one_turn")
    prompt = given.get("max_prompt_length")
    response = given.get("max_response_length")
    total = given.get("max_model_len")
    if total is not None:
        if prompt is None:
            left = total - response if response is not None else total // 2
            prompt = min(base["max_prompt_length"], left)
        if response is None:
            response = total - prompt
    else:
        prompt = base["max_prompt_length"] if prompt is None else prompt
        response = max(base["max_response_length"], turn or 0) if response is None else response
        total = prompt + response
    if turn is None:
        turn = min(base["max_response_length_in_one_turn"], response)
    return dict(zip(LENGTHS, (prompt, response, turn, total), strict=True))


# ---- writing -----------------------------------------------------------------------------------------------

_PLAIN_KEY = re.compile(r"^(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z][a-z0-9_]*\Z")


def to_yaml(tree: Mapping[str, Any], indent: int = 0) -> str:
    """Return nested mappings of scalars and short lists as YAML text, without using a library."""
    lines = []
    for key, value in tree.items():
        head = " " * indent + (key if _PLAIN_KEY.match(key) else _scalar(key)) + ":"
        if isinstance(value, Mapping) and value:
            lines.append(head + "\n" + to_yaml(value, indent + 2))
        else:
            lines.append(f"{head} {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: object) -> str:
    if isinstance(value, float):  # YAML 1.1 reads an exponent as a number only if there is a decimal point
        text = json.dumps(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_scalar(item) for item in value) + "]"
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)


def read_job_file(path: str | Path) -> Tree:
    """Read the document in a file. Raises `Refused(BAD_CONFIG)` with the name of the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise bad_config(f"{path}: there is no such file") from error
    except OSError as error:
        raise bad_config(f"{path}: it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise bad_config(f"{path}: it is not valid UTF-8 (at byte {error.start})") from error
    return read_document(text, str(path))
