"""Trains on saved rollouts: pushes each group of samples to the hive's queue as a rollout group."""

import hashlib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from bombus.errors import BombusError, Code, Refused, in_one_line
from bombus.sdk import transport
from bombus.slime.outcomes import is_aborted, reward_of
from bombus.slime.saved import load_rollout, rollout_file
from bombus.slime.settings import SlimeOptions
from bombus.slime.types import SlimeSample

NOT_TRAINED = -100
NO_LOGPROB = 1.0  # marks a token that was not sampled, as in Atropos
SEND_S = 120.0


async def push_rollouts(options: SlimeOptions, tell: Callable[[str], None]) -> int:
    """Push the groups in the files that `--load-debug-rollout-data` names. Returns the exit code."""
    template = options.load_debug_rollout_data
    assert template is not None
    url, key = transport.address(options.server_url, None)
    pushed = left_out = 0
    async with httpx.AsyncClient(**transport.client_options(url, options.engine, key), timeout=SEND_S) as http:
        for path in _files(template, options.num_rollout):
            samples = load_rollout(path)
            for number, group in enumerate(groups_of(samples)):
                body = rollout_group(group, options.namespace())
                if body is None:
                    left_out += 1
                    continue
                await _push(http, f"{path}:{number}", body)
                pushed += 1
    tell(f"{pushed} groups are in the queue" + (f", {left_out} had nothing to train on" if left_out else ""))
    return 0 if pushed else 1


def groups_of(samples: Sequence[SlimeSample]) -> list[list[SlimeSample]]:
    """Return the samples of each prompt. A sample without a `group_index` forms a group of its own."""
    found: dict[object, list[SlimeSample]] = defaultdict(list)
    for place, sample in enumerate(samples):
        found[("alone", place) if sample.group_index is None else sample.group_index].append(sample)
    return list(found.values())


def rollout_group(group: Sequence[SlimeSample], args: Namespace) -> dict[str, Any] | None:
    """Return a group in the form in which Atropos's environments push it, or None if no sample in it may be trained
    on."""
    kept = [one for one in group if not (one.remove_sample or is_aborted(one)) and one.response_length]
    if not kept:
        return None
    masks = [_mask(one) for one in kept]
    body: dict[str, Any] = {
        "tokens": [one.tokens for one in kept],
        "masks": masks,
        "scores": [reward_of(one, args) for one in kept],
        "generation_params": {"temperature": args.rollout_temperature},
    }
    if all(one.rollout_log_probs is not None for one in kept):
        body["inference_logprobs"] = [_logprobs(one, mask) for one, mask in zip(kept, masks, strict=True)]
    return body


def _mask(sample: SlimeSample) -> list[int]:
    kept = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    before = len(sample.tokens) - sample.response_length
    if before < 0 or len(kept) != sample.response_length:
        why = f"sample {sample.index} has a response of {sample.response_length} tokens that does not fit its tokens"
        raise Refused(Code.BAD_CONFIG, f"{why} ({len(sample.tokens)}) or its loss_mask ({len(kept)})")
    trained = [False] * before + [bool(one) for one in kept]
    return [token if train else NOT_TRAINED for token, train in zip(sample.tokens, trained, strict=True)]


def _logprobs(sample: SlimeSample, mask: Sequence[int]) -> list[float]:
    given = sample.rollout_log_probs or []
    if len(given) != sample.response_length:
        counts = f"{len(given)} rollout_log_probs for {sample.response_length} tokens of a response"
        raise Refused(Code.BAD_CONFIG, f"sample {sample.index} has {counts}: there must be one for each")
    before = len(mask) - len(given)
    scored = [NO_LOGPROB] * before + list(given)
    return [value if train != NOT_TRAINED else NO_LOGPROB for value, train in zip(scored, mask, strict=True)]


def _files(template: str, count: int | None) -> list[Path]:
    """Return the files of consecutive rollouts, from rollout 0 until a file is missing or there are `count` of them."""
    if rollout_file(template, 0) == rollout_file(template, 1):
        return [Path(template)]
    found: list[Path] = []
    while len(found) != count and (path := rollout_file(template, len(found))).is_file():
        found.append(path)
    if not found:
        raise Refused(Code.BAD_CONFIG, f"{rollout_file(template, 0)} does not exist: there is no rollout to load")
    return found


async def _push(http: httpx.AsyncClient, name: str, body: dict[str, Any]) -> None:
    """Push one group. The group counts once, however often it is sent within the hive's deduplication window."""
    content = msgspec.json.encode(body)
    key = hashlib.sha256(name.encode() + content).hexdigest()
    headers = {"content-type": "application/json", "x-idempotency-key": key}
    try:
        answer = await http.post("/scored_data", content=content, headers=headers)
    except httpx.RequestError as error:
        raise BombusError(f"{http.base_url} cannot be reached: {in_one_line(error)}") from error
    if answer.status_code != 200:
        raise BombusError(f"the hive refused the group {name} ({answer.status_code}): {answer.text[:500]}")
