"""Fine-tune a model of a hive with xorl-client, unmodified: it learns to go on with three sentences.

Start `bombus up` first; `pip install xorl-client` here. XORL_BASE_URL is the hive's address, by default
http://127.0.0.1:10086.
"""

import os

import xorl_client
from xorl_client import types

BASE = os.environ.get("BASE_MODEL", "tiny")
SENTENCES = [b"bees find flowers", b"bees build combs", b"bees dance at home"]


def datum(text: bytes) -> types.Datum:
    """Return a sentence, each of whose bytes is to be predicted from those before it."""
    tokens = [byte % 40 for byte in text]  # `tiny` has 44 tokens; a tokenizer would give better ones
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    address = os.environ.get("XORL_BASE_URL", "http://127.0.0.1:10086")
    service = xorl_client.ServiceClient(base_url=address, api_key=os.environ.get("XORL_API_KEY", "any"))
    model = service.create_lora_training_client(base_model=BASE, rank=8, model_id="sft")
    batch = [datum(sentence) for sentence in SENTENCES]
    try:
        for step in range(40):
            scored = model.forward_backward(batch, "causallm_loss").result()
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            if step % 5 == 0 or step == 39:
                print(f"step {step}: loss {scored.metrics['loss:mean']:.3f} for each token", flush=True)
        print("saved as", model.save_state("bees").result().path)
    finally:
        model.unload().result()  # its name is free again


if __name__ == "__main__":
    main()
