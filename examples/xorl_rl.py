"""Reinforce a rule with xorl-client, unmodified: sample, reward, step, and put the sampler in sync every other step.

Start `bombus up` first; `pip install xorl-client` here. XORL_BASE_URL is the hive's address, by default
http://127.0.0.1:10086. Its own replicas sample, unless an SGLang or vLLM server was registered
(`model.add_inference_endpoint`): then XORL_INFERENCE_URL is that server's address.
"""

import os
from statistics import mean

import xorl_client
from xorl_client import types

BASE = os.environ.get("BASE_MODEL", "tiny")
SYNC_EVERY = 2
PROMPT = [5, 6, 7]
ANSWER = types.SamplingParams(max_tokens=8, temperature=1.0)


def rewards_of(sample: types.SampledSequence) -> list[float]:
    """Return the reward of each token: 1 for the first eight of the vocabulary."""
    return [float(token < 8) for token in sample.tokens]


def datum(sample: types.SampledSequence, baseline: float) -> types.Datum:
    """Return a sample as it is trained on, with the logprobs that it was drawn with."""
    tokens, before = list(sample.tokens), len(PROMPT) - 1
    inputs = {
        "target_tokens": PROMPT[1:] + tokens,
        "logprobs": [0.0] * before + list(sample.logprobs or []),
        "advantages": [0.0] * before + [reward - baseline for reward in rewards_of(sample)],
    }
    return types.Datum(model_input=types.ModelInput.from_ints(PROMPT + tokens[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    address = os.environ.get("XORL_BASE_URL", "http://127.0.0.1:10086")
    service = xorl_client.ServiceClient(base_url=address, api_key=os.environ.get("XORL_API_KEY", "any"))
    sampler = xorl_client.SamplingClient(base_url=os.environ.get("XORL_INFERENCE_URL", address))
    model = service.create_lora_training_client(base_model=BASE, rank=8)
    try:
        for step in range(16):
            if step % SYNC_EVERY == 0 and not (synced := model.sync_inference_weights().result()).success:
                raise SystemExit(synced.message)
            samples = sampler.sample(types.ModelInput.from_ints(PROMPT), ANSWER, num_samples=64).result().sequences
            reward = mean(reward for sample in samples for reward in rewards_of(sample))
            print(f"step {step}: reward {reward:.3f} for each token", flush=True)
            model.forward_backward([datum(sample, reward) for sample in samples], "importance_sampling").result()
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    finally:
        model.kill_session(save_checkpoint=False).result()


if __name__ == "__main__":
    main()
