"""Reinforce a rule with the tinker SDK, unmodified: sample, reward, step on the samples' own logprobs, and again.

Start `bombus up` first; `pip install tinker` here. TINKER_BASE_URL is the hive's address, by default
http://127.0.0.1:10086.
"""

import os
from statistics import mean

import tinker
from tinker import types

BASE = os.environ.get("BASE_MODEL", "tiny")
PROMPT = [5, 6, 7]
ANSWER = types.SamplingParams(max_tokens=8, temperature=1.0)


def rewards_of(sample: types.SampledSequence) -> list[float]:
    """Return the reward of each token: 1 for the first eight of the vocabulary."""
    return [float(token < 8) for token in sample.tokens]


def datum(sample: types.SampledSequence, baseline: float) -> types.Datum:
    """Return a sample as it is trained on: its prompt counts nothing, each token what it earned above the baseline."""
    tokens, before = list(sample.tokens), [0.0] * (len(PROMPT) - 1)
    inputs = {
        "target_tokens": PROMPT[1:] + tokens,
        "logprobs": before + list(sample.logprobs or []),
        "advantages": before + [reward - baseline for reward in rewards_of(sample)],
    }
    return types.Datum(model_input=types.ModelInput.from_ints(PROMPT + tokens[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    address = os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:10086")
    service = tinker.ServiceClient(base_url=address, api_key=os.environ.get("TINKER_API_KEY", "tml-any"))
    model = service.create_lora_training_client(base_model=BASE, rank=8).result()
    for step in range(15):
        sampler = model.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(PROMPT)
        samples = sampler.sample(prompt=prompt, num_samples=64, sampling_params=ANSWER).result().sequences
        reward = mean(reward for sample in samples for reward in rewards_of(sample))
        print(f"step {step}: reward {reward:.3f} for each token", flush=True)
        scored = model.forward_backward([datum(sample, reward) for sample in samples], "importance_sampling")
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        scored.result()
    service.close("success").result()  # its model makes room at once, and no thread of the SDK works while Python exits


if __name__ == "__main__":
    main()
