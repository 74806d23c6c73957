#!/usr/bin/env bash
# Asked:     does transformers 4 load a tokenizer that transformers 5 has saved?
# One would  guess yes: a fast tokenizer is its tokenizer.json, which has the same form in both, and the rest are settings.
# In truth   no: 5 names a class that 4 does not have (`TokenizersBackend`). Once that is mended by hand, a tokenizer with special
#            tokens of its own is refused for another reason, a list `extra_special_tokens` where 4 takes a mapping, in words
#            that are about something else (protobuf is not installed). With `additional_special_tokens` in its place it loads.
# Version:   transformers 5.23.0 saves, 4.57.6 loads
# Source:    transformers/models/auto/tokenization_auto.py of 4.57.6, "does not exist or is not currently imported"
# Seen:      as it was saved:           ValueError: Tokenizer class TokenizersBackend does not exist or is not currently imported.
#            with a class of 4 and 5:   ImportError: requires the protobuf library but it was not found in your environment. ...
#            and both names of 4:       loaded, special tokens ['<a>']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.23.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet "transformers==$version"
done
cat > "$folder/save.py" <<'PYTHON'
import sys

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")
tokenizer.add_special_tokens({"extra_special_tokens": ["<a>"]})
tokenizer.save_pretrained(sys.argv[1])
PYTHON
cat > "$folder/load.py" <<'PYTHON'
import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

file = Path(sys.argv[1]) / "tokenizer_config.json"


def loaded():
    try:
        return f"loaded, special tokens {AutoTokenizer.from_pretrained(sys.argv[1]).additional_special_tokens}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


seen = [loaded()]
settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
file.write_text(json.dumps(settings))
seen.append(loaded())
settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
file.write_text(json.dumps(settings))
seen.append(loaded())
for what, result in zip(("as it was saved:", "with a class of 4 and 5:", "and both names of 4:"), seen):
    print(f"{what:<26} {result}")
assert seen[0].startswith("ValueError: Tokenizer class TokenizersBackend does not exist")
assert not seen[1].startswith("loaded")
assert seen[2] == "loaded, special tokens ['<a>']"
PYTHON
"$folder/5.23.0/bin/python" "$folder/save.py" "$folder/saved"
"$folder/4.57.6/bin/python" "$folder/load.py" "$folder/saved"
