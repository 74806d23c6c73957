"""Write rollout groups as the JSON that trainers read. All fields are present; those that were not given are null."""

from collections.abc import Iterable, Iterator

import msgspec

from bombus.hive.trajectories.records import PackedCandidates, PackedFloats, RolloutGroup, int_rows

NO_BATCH = b'{"batch":null}'
# The answer to `/latest_example` before the first group is pushed.
_NO_EXAMPLE: dict[str, list[object]] = {
    name: []
    for name in (
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    )
}
_encode = msgspec.json.Encoder().encode


def write_batch(groups: Iterable[RolloutGroup]) -> Iterator[bytes]:
    """Yield the parts of a batch, one for each group, so that only one group's lists are in memory at a time."""
    before = b'{"batch":['
    for group in groups:
        yield before + write_group(group)
        before = b","
    yield b"]}" if before == b"," else before + b"]}"


def write_latest(group: RolloutGroup | None) -> bytes:
    """Return the answer to `/latest_example`: the newest group, or empty lists."""
    return _encode(_NO_EXAMPLE) if group is None else write_group(group)


def write_group(group: RolloutGroup) -> bytes:
    """Return a group with all of its fields, holding the values that were sent."""
    lengths = group.sequence_lengths()
    return _encode(
        {
            "tokens": int_rows(group.tokens, lengths),
            "masks": int_rows(group.masks, lengths),
            "scores": group.scores.rows([group.sequences])[0],
            "advantages": _floats(group.advantages, group.advantage_rows()),
            "ref_logprobs": _floats(group.ref_logprobs, lengths),
            "messages": _json(group.messages),
            "generation_params": _json(group.generation_params),
            "inference_logprobs": _floats(group.inference_logprobs, lengths),
            "overrides": _json(group.overrides),
            "group_overrides": _json(group.group_overrides),
            "images": _json(group.images),
            "env_id": group.environment,
            "distill_token_ids": _candidates(group.distill_token_ids, lengths),
            "distill_logprobs": _candidates(group.distill_logprobs, lengths),
        }
    )


def _floats(numbers: PackedFloats | None, lengths: list[int]) -> list[list[float]] | None:
    return None if numbers is None else numbers.rows(lengths)


def _candidates(candidates: PackedCandidates | None, lengths: list[int]) -> object:
    return None if candidates is None else candidates.rows(lengths)


def _json(text: bytes) -> msgspec.Raw | None:
    return msgspec.Raw(text) if text else None
