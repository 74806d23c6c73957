#!/usr/bin/env bash
# Asked:     which layers does peft adapt when `target_modules` has the whole name of one, such as "layers.0.proj"?
# One would  guess that one alone: a whole name, with dots, is the module of that name; only a last part ("proj") is a pattern.
# In truth   each entry also matches every module whose name ends in "." and the entry, and no list can say otherwise: where a
#            model has a second tower with names of the same form, its layer is adapted too, without a word. Where the name is
#            a number (the first linear layer of CTRL's blocks is `ffn.0`) it matches the blocks themselves (`h.0`), and peft
#            refuses the model. A regular expression (a text in place of the list) is matched against whole names.
# Version:   peft 0.21.2, with torch 2.13.0 and transformers 5.23.0
# Source:    https://huggingface.co/docs/peft/package_reference/lora (`target_modules`: "exact match" or "ends with");
#            peft/tuners/tuners_utils.py, `check_target_module_exists`
# Seen:      ["layers.0.proj"] adapts layers.0.proj and vision.layers.0.proj; r"layers\.0\.proj" adapts layers.0.proj;
#            ["0"] of CTRL: ValueError: Target module EncoderLayer( ...
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet peft==0.21.2 torch==2.13.0 transformers==5.23.0
cat > "$folder/show.py" <<'PYTHON'
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import CTRLConfig, CTRLLMHeadModel


def layers():
    return nn.ModuleList([nn.ModuleDict({"proj": nn.Linear(4, 4)})])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.vision = nn.ModuleDict({"layers": layers()})


def adapted(target):
    names = [name for name, each in get_peft_model(Model(), LoraConfig(target_modules=target)).named_parameters() if each.requires_grad]
    return sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names})


by_name, by_expression = adapted(["layers.0.proj"]), adapted(r"layers\.0\.proj")
print("by its whole name:", by_name)
print("by an expression: ", by_expression)
ctrl = CTRLLMHeadModel(CTRLConfig(vocab_size=8, n_positions=8, n_embd=8, dff=8, n_layer=1, n_head=2))
assert isinstance(ctrl.transformer.h[0].ffn[0], nn.Linear)
try:
    get_peft_model(ctrl, LoraConfig(target_modules=["0"]))
    refused = ""
except ValueError as error:
    refused = str(error).partition("\n")[0]
print("CTRL's `0`:       ", refused)
assert by_name == ["layers.0.proj", "vision.layers.0.proj"]
assert by_expression == ["layers.0.proj"]
assert refused.startswith("Target module EncoderLayer(")
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
