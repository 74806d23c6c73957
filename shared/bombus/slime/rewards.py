"""`async_rm` and `batched_async_rm`, which ask the reward function that is named for the samples."""

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from bombus.errors import Code, Refused
from bombus.slime.functions import load_function
from bombus.slime.http import post

REMOTE_RETRIES = 10


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
    """Return the rewards of samples; a custom function is called once, with all of them."""
    if args.custom_rm_path:
        rewards: Sequence[Any] = await load_function(args.custom_rm_path)(args, samples, **kwargs)
        return rewards
    return await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples))
