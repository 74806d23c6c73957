"""A hook file in the shape of slime's examples: turns of search and answer, tokens and logprobs kept by hand."""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

TURNS_MAX = 2


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    text = sample.prompt
    params = {**sampling_params, "stop": ["</search>", "</answer>"]}
    for _ in range(TURNS_MAX):
        output = await post(url, {"text": text, "sampling_params": params, "return_logprob": True})
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        scored = meta["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[entry[1] for entry in scored],
            log_probs=[entry[0] for entry in scored],
            trainable=True,
            meta_info=meta,
            text=output["text"],
        )
        text += output["text"]
        if "</answer>" in output["text"] or meta["finish_reason"]["type"] == "length":
            break
        found = "<information>" + sample.metadata["document"] + "</information>"
        ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=ids, trainable=False, text=found)
        text += found
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("not a Sample")
    return {"score": 1.0 if f"<answer>{sample.label}</answer>" in sample.response else 0.0}


async def generate_and_give_up(args, sample, sampling_params):
    sample.status = Sample.Status.ABORTED
    return sample


async def two_agents(args, sample, sampling_params) -> list[Sample]:
    """Two prompts in one attempt, each with a reward of its own."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    made = []
    for number, prompt in enumerate((sample.prompt, "check it")):
        one = Sample(prompt=prompt, index=sample.index, group_index=sample.group_index)
        one.tokens = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        asked = {"input_ids": one.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, asked)
        scored = output["meta_info"]["output_token_logprobs"]
        one.append_response_tokens(
            args,
            tokens=[entry[1] for entry in scored],
            log_probs=[entry[0] for entry in scored],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        one.reward = {"score": float(number)}
        made.append(one)
    return made


async def rewards_of_a_group(args, samples, **kwargs):
    return [{"score": number / len(samples)} for number, _ in enumerate(samples)]


def removes_the_first(args, groups):
    groups[0][0].remove_sample = True
