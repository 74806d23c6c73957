#!/usr/bin/env bash
# Asked:     does a tool call that a server answered come back as it was, when the agent appends the message that OpenAI's SDK
#            gave it and sends it again?
# One would  guess yes: `message.model_dump()` has the same fields with the same values, and JSON objects have no order.
# In truth   the SDK writes the fields of a call's function in its own order, `arguments` before `name`. Chat templates that
#            write a call with `tojson` (Mistral's in vLLM's sources does) keep the order they are given, so the prompt of the
#            next turn has other tokens than the model sampled: a prefix cache misses it, and a trainer that takes the prompt
#            for what the model said learns from tokens that it never said. A server must put the fields in order itself.
# Version:   openai 3.52.0, transformers 5.23.0 with jinja2 3.1.6
# Source:    openai/types/chat/chat_completion_message_function_tool_call.py (class Function);
#            https://huggingface.co/docs/transformers/chat_templating (`tojson`)
# Seen:      answered:  [{"name": "weather", "arguments": "{}"}]
#            sent back: [{"arguments": "{}", "name": "weather"}]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openai==3.52.0 transformers==5.23.0 jinja2==3.1.6
cat > "$folder/show.py" <<'PYTHON'
from openai.types.chat import ChatCompletionMessage
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
tokenizer.chat_template = "{{ messages[0].tool_calls | map(attribute='function') | list | tojson }}"
call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
answered = {"role": "assistant", "content": None, "tool_calls": [call]}
sent_back = ChatCompletionMessage.model_validate(answered).model_dump(exclude_none=True)


def rendered(message):
    return tokenizer.apply_chat_template([message], tokenize=False)


print("answered: ", rendered(answered))
print("sent back:", rendered(sent_back))
assert sent_back["tool_calls"][0] == call  # as JSON has it
assert rendered(answered) == '[{"name": "weather", "arguments": "{}"}]'
assert rendered(sent_back) == '[{"arguments": "{}", "name": "weather"}]'
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
