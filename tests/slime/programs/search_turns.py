"""A hook file in the shape of slime's examples: turns of search and answer, tokens and logprobs kept by hand."""

import asyncio
import resource

from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.sglang_rollout import generate as generate_once
from slime.utils.http_utils import post
from slime.utils.types import Sample

from bombus import InfraError

TURNS_MAX = 2
both = asyncio.Barrier(2)
told = asyncio.Event()
has_failed = False


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


async def reward_where_many_files_are_allowed(args, sample, **kwargs):
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    return await reward_func(args, sample)


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


async def generate_and_score(args, sample: Sample, sampling_params):
    sample = await generate_once(args, sample, sampling_params)
    sample.reward = {"score": 0.75}
    return sample


async def generate_and_raise(args, sample: Sample, sampling_params):
    raise KeyError("document")


def keeps_nothing_for_it_raises(args, groups, *rest):
    raise KeyError("score")


async def generate_anew(args, sample, sampling_params):
    """A sample of its own making, as of an environment that numbers its tasks, with more in it than files can hold."""
    made = await generate_once(args, Sample(prompt=f"task {sample.prompt + 1}"), sampling_params)
    made.status = "completed"
    made.metadata = {"environment": object(), "turns": 1}
    made.reward = {"score": float(sample.index % 2)}
    return made


async def generate_and_remove_every_other(args, sample, sampling_params):
    sample = await generate_once(args, sample, sampling_params)
    sample.remove_sample = sample.index % 2 == 0
    return sample


async def removes_the_first_of_every_other_group(args, sample, sampling_params):
    sample = await generate_once(args, sample, sampling_params)
    sample.remove_sample = sample.group_index % 2 == 0 and sample.index % 2 == 0
    return sample


async def two_chats_with_their_own_rewards_at_first(args, sample, sampling_params):
    if sample.group_index:
        return await generate_once(args, sample, sampling_params)
    made = []
    for number in range(2):
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/v1/chat/completions"
        answer = await post(url, {"model": "m", "messages": [{"role": "user", "content": sample.prompt}]})
        text = answer["choices"][0]["message"]["content"]
        made.append(Sample(prompt=sample.prompt, response=text, reward={"score": float(number)}))
    return made


async def gives_every_other_group_up(args, sample, sampling_params):
    if sample.group_index % 2 == 0:
        sample.status = Sample.Status.ABORTED
        return sample
    return await generate_once(args, sample, sampling_params)


async def generate_three_times(args, sample, sampling_params):
    """Two turns with a token between them fill the response; of the third nothing is asked."""
    for _ in range(2):
        sample = await generate_once(args, sample, sampling_params)
        sample.append_response_tokens(args, tokens=[5], trainable=False)
    sample = await generate_once(args, sample, sampling_params)
    assert sample.status is Sample.Status.TRUNCATED
    sample.reward = {"score": 1.0}
    return sample


async def fails_at_first(args, sample, sampling_params):
    global has_failed
    if not has_failed:
        has_failed = True
        raise RuntimeError("the tool has gone")
    return await generate_once(args, sample, sampling_params)


async def generate_two_at_a_time(args, sample, sampling_params):
    sample = await generate_once(args, sample, sampling_params)
    sample.reward = {"score": 1.0}
    await both.wait()
    return sample


async def generate_the_first_before_others(args, sample, sampling_params):
    """The others have their answer, and wait until the filter has seen the group of the first."""
    sample = await generate_once(args, sample, sampling_params)
    sample.reward = {"score": 1.0}
    if sample.group_index:
        await told.wait()
    return sample


def tells_the_others(args, group, **kwargs):
    told.set()
    return True


async def waits_until_told(args, sample, sampling_params):
    await told.wait()
    return await generate_once(args, sample, sampling_params)


async def asks_for_what_is_not_there(args, sample, **kwargs):
    from slime.rollout.rm_hub.math_dapo_utils import compute_score

    return compute_score(sample.response, sample.label)


async def seven(args, sample, **kwargs):
    return 7.0


async def raises(args, sample, sampling_params):
    raise OSError("the search server is away")


async def raises_after_an_answer(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    raise OSError("the search server is away")


async def reward_that_raises(args, sample, **kwargs):
    raise OSError("the judge is away")


async def reward_of_a_judge_that_is_away(args, sample, **kwargs):
    raise InfraError("the judge is away")


async def group_reward_that_raises(args, samples, **kwargs):
    raise KeyError("answer")


async def reward_of_nonsense(args, sample, **kwargs):
    return {"score": "good"}


async def no_reward(args, sample, **kwargs):
    return None


async def is_cut(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    sample.status = Sample.Status.TRUNCATED
    return sample
