"""Train a policy that stays near a reference, both on one base, with xorl-client, unmodified.

The policy has rank 32. The reference has rank 16 and is never trained: `forward` alone is asked of it. Start
`bombus up` first; `pip install xorl-client` here. XORL_BASE_URL is the hive's address.
"""

import os
from statistics import mean

import xorl_client
from xorl_client import types

BASE = os.environ.get("BASE_MODEL", "tiny")
PROMPT, BEFORE = [5, 6, 7], [0.0, 0.0]  # of a sequence, what is its prompt counts nothing
ANSWER = types.SamplingParams(max_tokens=8, temperature=1.0)


def datum(sample: types.SampledSequence, **inputs: list[float]) -> types.Datum:
    tokens = list(sample.tokens)
    inputs = {"target_tokens": PROMPT[1:] + tokens, **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(PROMPT + tokens[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    address = os.environ.get("XORL_BASE_URL", "http://127.0.0.1:10086")
    service = xorl_client.ServiceClient(base_url=address, api_key=os.environ.get("XORL_API_KEY", "any"))
    policy = service.create_lora_training_client(base_model=BASE, rank=32, model_id="policy")
    reference = service.create_lora_training_client(base_model=BASE, rank=16, model_id="reference")
    try:
        for step in range(10):
            path = policy.save_weights_for_sampler(f"step-{step}").result().path
            sampler = service.create_sampling_client(base_url=address, model_path=path)
            samples = sampler.sample(types.ModelInput.from_ints(PROMPT), ANSWER, num_samples=64).result().sequences
            scored = reference.forward([datum(sample) for sample in samples], "cross_entropy").result()
            near = [list(output["logprobs"].data) for output in scored.loss_fn_outputs]
            reward = mean(token < 8 for sample in samples for token in sample.tokens)
            kl = mean(lp - ref for s, row in zip(samples, near) for lp, ref in zip(s.logprobs, row[2:]))
            print(f"step {step}: reward {reward:.3f}, {kl:.3f} nats from the reference", flush=True)
            data = [
                datum(
                    sample,
                    logprobs=BEFORE + list(sample.logprobs),
                    advantages=BEFORE + [(token < 8) - reward for token in sample.tokens],
                    ref_logprobs=row,
                )
                for sample, row in zip(samples, near)
            ]
            policy.forward_backward(data, "drgrpo", {"beta": 0.1}).result()
            policy.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    finally:
        for model in (policy, reference):
            model.unload().result()


if __name__ == "__main__":
    main()
