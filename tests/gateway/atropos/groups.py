"""Rollout groups as environments send them, made of a seed."""

import random
import struct
from typing import Any

Group = dict[str, Any]


def random_group(seed: int, environments: int = 0) -> Group:
    """Return a group with some of the fields that it may have. Each is one that Atropos takes."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, 9) for _ in range(chance.randint(1, 5))]
    group: Group = {
        "tokens": [[chance.randrange(200_000) for _ in range(length)] for length in lengths],
        "masks": [[chance.choice((-100, chance.randrange(200_000))) for _ in range(length)] for length in lengths],
        "scores": [_number(chance) for _ in lengths],
    }
    for name in ("advantages", "ref_logprobs", "inference_logprobs"):
        _maybe(chance, group, name, [[_number(chance) for _ in range(length)] for length in lengths])
    if chance.random() < 0.1:
        group["advantages"] = [[_number(chance) for _ in range(chance.randrange(4))] for _ in lengths]
    counts = [[chance.randrange(4) for _ in range(length)] for length in lengths]
    candidates = [[[chance.randrange(99) for _ in range(count)] for count in row] for row in counts]
    _maybe(chance, group, "distill_token_ids", candidates)
    of_teacher = [[[_number(chance) for _ in range(count)] for count in row] for row in counts]
    _maybe(chance, group, "distill_logprobs", of_teacher)
    _maybe(chance, group, "generation_params", {"temperature": 0.7, "stop": ["\n", "ü"], "seed": 1 << 40})
    messages = [[{"role": "user", "content": _text(chance), "reward": None}] for _ in lengths]
    _maybe(chance, group, "messages", messages)
    _maybe(chance, group, "overrides", [{"set_advantage_to_zero": chance.random() < 0.5} for _ in lengths])
    _maybe(chance, group, "group_overrides", {"group_size": len(lengths), "more": {"a": [1.5, None]}})
    _maybe(chance, group, "images", chance.choice(("data:,x", [["a"], None], 3.25, {"a": _text(chance)})))
    _maybe(chance, group, "env_id", chance.randrange(environments) if environments else None)
    if chance.random() < 0.1:
        group["of_no_use"] = [1, {"a": 2}]
    return group


def _number(chance: random.Random) -> float | int | bool:
    number = chance.gauss(0.0, 3.0)
    as_float32: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return chance.choice((as_float32, as_float32, number, 0.1, 1, 0, True, -0.0, 1e300, 1e-300, 5e-324))


def _text(chance: random.Random) -> str:
    return chance.choice(("", "a", 'quoted "text"\\', "line\nline\t", "\u00fc\u4e2d\U0001f41d", "</s>\u2028"))


def _maybe(chance: random.Random, group: Group, name: str, value: object) -> None:
    """Give a field its value, or null, or leave it out."""
    choice = chance.random()
    if choice < 0.5:
        group[name] = value
    elif choice < 0.7:
        group[name] = None
