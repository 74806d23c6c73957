"""`GenerateState`, and the default generate function: one answer to each prompt."""

import asyncio
import importlib.util
from argparse import Namespace
from typing import Any

from bombus.errors import Code, Refused, in_one_line
from bombus.slime.http import post
from bombus.slime.types import SlimeSample
from bombus.weights.models import SMOLLM2, TINY, resolve_model


class GenerateState:
    """The state that all samples share: the tokenizer, the sampling parameters, and the limit on concurrent samples.

    Every call returns the same object, which keeps the arguments of the first call.
    """

    _only: "GenerateState | None" = None
    args: Namespace
    tokenizer: Any
    processor: None
    semaphore: asyncio.Semaphore
    sampling_params: dict[str, Any]
    aborted: bool

    def __new__(cls, args: Namespace) -> "GenerateState":
        if cls._only is None:
            cls._only = super().__new__(cls)
            cls._only._begin(args)
        return cls._only

    @classmethod
    def clear(cls) -> None:
        """Discard the object, so that the next call creates one with its own arguments."""
        cls._only = None

    def _begin(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.processor = None
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)
        self.sampling_params = sampling_params_of(args)
        self.aborted = False


def sampling_params_of(args: Namespace) -> dict[str, Any]:
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": None,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def load_tokenizer(name_or_path: str, **_: object) -> Any:
    """Return a model's tokenizer, as transformers loads it, or the tokenizer of `tiny` or `smollm2`, which come with
    bombus.

    Code that comes with a model is never run. Raises `Refused` if the tokenizer cannot be loaded.
    """
    if importlib.util.find_spec("transformers") is None:
        raise Refused(Code.BAD_CONFIG, "hook files need a tokenizer: pip install transformers")
    from transformers import AutoTokenizer

    try:
        own = name_or_path in (TINY, SMOLLM2)
        return AutoTokenizer.from_pretrained(resolve_model(name_or_path) if own else name_or_path)
    except (OSError, ValueError) as error:
        why = f"the tokenizer of {name_or_path!r} cannot be loaded: give a model's folder, or a name on the hub"
        raise Refused(Code.BAD_CONFIG, f"{why} ({in_one_line(error)})") from error


def get_model_url(args: Namespace, model_name: str, endpoint: str = "/generate") -> str:
    """Return the address of the model. A sample's episode has only one model, so `model_name` is ignored."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


async def generate(args: Namespace, sample: SlimeSample, sampling_params: dict[str, Any]) -> SlimeSample:
    """Sample an answer to a prompt, or continue the response. `max_new_tokens` limits the response as a whole."""
    tokenizer = GenerateState(args).tokenizer
    if not isinstance(sample.prompt, str):
        what = (
            "a list of messages: give --apply-chat-template, or" if isinstance(sample.prompt, list) else "not a text:"
        )
        why = f"a prompt is {what} name a function that reads it with --custom-generate-function-path"
        raise Refused(Code.BAD_CONFIG, why)
    if not sample.tokens:
        sample.tokens = list(tokenizer.encode(sample.prompt, add_special_tokens=False))
    left = sampling_params["max_new_tokens"] - sample.response_length
    if left <= 0:
        sample.status = SlimeSample.Status.TRUNCATED
        return sample
    params = {**sampling_params, "max_new_tokens": left}
    asked = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    answer = await post(get_model_url(args, ""), asked)
    meta = answer["meta_info"]
    scored = meta.get("output_token_logprobs", [])
    sample.append_response_tokens(
        args,
        tokens=[entry[1] for entry in scored],
        log_probs=[entry[0] for entry in scored],
        meta_info=meta,
        text=answer["text"],
    )
    return sample
