"""Fine-tune a model of a hive with the tinker SDK, unmodified: it learns to go on with three sentences.

Start `bombus up` first; `pip install tinker` here. TINKER_BASE_URL is the hive's address, by default
http://127.0.0.1:10086.
"""

import os

import tinker
from tinker import types

BASE = os.environ.get("BASE_MODEL", "tiny")
RANK = 0  # all weights: an adapter learns little on a base of random weights
SENTENCES = [b"bees find flowers", b"bees build combs", b"bees dance at home"]


def datum(text: bytes) -> types.Datum:
    """Return a sentence, each of whose bytes is to be predicted from those before it."""
    tokens = [byte % 40 for byte in text]  # `tiny` has 44 tokens; a tokenizer would give better ones
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    address = os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:10086")
    service = tinker.ServiceClient(base_url=address, api_key=os.environ.get("TINKER_API_KEY", "tml-any"))
    model = service.create_lora_training_client(base_model=BASE, rank=RANK).result()
    batch = [datum(sentence) for sentence in SENTENCES]
    count = sum(len(sentence) - 1 for sentence in SENTENCES)
    for step in range(40):
        scored = model.forward_backward(batch, "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-2))
        loss = scored.result().metrics["loss:sum"] / count
        stepped.result()
        if step % 5 == 0 or step == 39:
            print(f"step {step}: loss {loss:.3f} for each token", flush=True)
    print("saved as", model.save_state("bees").result().path)
    service.close("success").result()  # its model makes room at once, and no thread of the SDK works while Python exits


if __name__ == "__main__":
    main()
