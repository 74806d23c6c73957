"""The prompts in a file of JSON lines, as samples to be generated."""

import copy
import random
from pathlib import Path
from typing import Any

import msgspec

from bombus.json_lines import read_json_lines
from bombus.slime.settings import SlimeOptions
from bombus.slime.types import SlimeSample


class PromptSource:
    """Provides groups of samples endlessly, one prompt per group, in the order of the file or shuffled.

    After the last prompt, this begins again with the first or, if the prompts are shuffled, in a new order.
    """

    def __init__(self, options: SlimeOptions, prompts: list[SlimeSample]) -> None:
        self.prompts = prompts
        self._n = options.n_samples_per_prompt
        self._seed = options.rollout_seed if options.rollout_shuffle else None
        self._order: list[int] = []
        self._epoch = 0
        self._groups = 0

    @property
    def begun(self) -> int:
        """Return how many groups have been given out."""
        return self._groups

    def group(self) -> list[SlimeSample]:
        if not self._order:
            self._order = list(range(len(self.prompts)))[::-1]
            if self._seed is not None:
                random.Random(self._seed + self._epoch).shuffle(self._order)
            self._epoch += 1
        prompt = self.prompts[self._order.pop()]
        made = [copy.deepcopy(prompt) for _ in range(self._n)]
        for number, sample in enumerate(made):
            sample.group_index = self._groups
            sample.index = self._groups * self._n + number
        self._groups += 1
        return made


def read_prompts(path: Path, options: SlimeOptions, tokenizer: Any) -> list[SlimeSample]:
    """Return a sample for each non-empty line. Raises `Refused` with the number of an invalid line."""

    def sample(line: str, number: int) -> SlimeSample:
        return _sample(msgspec.json.decode(line, type=dict[str, Any]), options, tokenizer)

    return read_json_lines(path, "prompt", sample, option="--prompt-data")


def _sample(data: dict[str, Any], options: SlimeOptions, tokenizer: Any) -> SlimeSample:
    prompt = data.get(options.input_key)
    if prompt is None:
        raise ValueError(f"it has no {options.input_key!r}; choose another field with --input-key")
    if options.apply_chat_template and not isinstance(prompt, str | list):
        why = f"{options.input_key!r} is neither a string nor a list of messages, which --apply-chat-template needs"
        raise ValueError(f"{why}; choose another field with --input-key")
    if options.label_key and options.label_key not in data:
        raise ValueError(f"it has no {options.label_key!r}, which --label-key names")
    metadata = data.get(options.metadata_key)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict):
        raise ValueError(f"{options.metadata_key!r} is not an object; choose another field with --metadata-key")
    tools = data.get(options.tool_key) if options.tool_key else None
    if isinstance(tools, str):
        tools = msgspec.json.decode(tools)
    if tools is not None:
        metadata = {**metadata, "tools": tools}
    if options.apply_chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt = str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                **options.chat_template_arguments,
            )
        )
    label = data[options.label_key] if options.label_key else None
    return SlimeSample(prompt=prompt, label=label, metadata=metadata)
