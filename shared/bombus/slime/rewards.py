"""`async_rm` and `batched_async_rm`, which call the chosen reward function, and the scoring of boxed answers."""

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from bombus.errors import Code, Refused
from bombus.slime.functions import load_function
from bombus.slime.http import post

REMOTE_RETRIES = 10
BOX = "\\boxed{"
END_CHARS = 100  # how many characters at a solution's end are searched for the box


async def async_rm(args: Namespace, sample: Any, **kwargs: Any) -> Any:
    """Return the reward of a sample: from its own function, from `--custom-rm-path`, or from `--rm-url`."""
    if path := sample.custom_rm_path or args.custom_rm_path:
        return await load_function(path)(args, sample, **kwargs)
    kind = str((sample.metadata or {}).get("rm_type") or args.rm_type or "")
    if kind == "remote_rm":
        asked = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        return await post(args.rm_url, asked, max_retries=REMOTE_RETRIES)
    raise Refused(Code.BAD_CONFIG, refusal_of(kind))


def refusal_of(kind: str) -> str:
    has = f"--rm-type {kind} is not offered" if kind else "there is no reward function"
    return f"{has}: name one with --custom-rm-path, or give --rm-type remote_rm and --rm-url"


async def batched_async_rm(args: Namespace, samples: Sequence[Any], **kwargs: Any) -> Sequence[Any]:
    """Return the rewards of samples. A custom function is called once with all of them."""
    if args.custom_rm_path:
        rewards: Sequence[Any] = await load_function(args.custom_rm_path)(args, samples, **kwargs)
        return rewards
    return await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples))


def score_of_box(solution_str: str, ground_truth: object, strict_box_verify: bool = False) -> dict[str, Any]:
    """Return a score of 1 if the last box at the end of a solution contains exactly the true answer, and -1 otherwise.

    This is slime's `math_dapo_utils.compute_score` with `strict_box_verify`. Raises `Refused` without that flag.
    """
    if not strict_box_verify:
        why = "slime.rollout.rm_hub.math_dapo_utils.compute_score is offered only with strict_box_verify=True"
        needs = "otherwise it needs slime's rules for units and LaTeX. Put a copy of that file beside the hook file"
        raise Refused(Code.UNSUPPORTED, f"{why}: {needs}, and import it from there")
    found = boxed(solution_str[-END_CHARS:])
    is_right = found == ground_truth
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": found}


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` in a text, or None if there is no box or the last one is not
    closed."""
    start = text.rfind(BOX) + len(BOX)
    if start < len(BOX):
        return None
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None
