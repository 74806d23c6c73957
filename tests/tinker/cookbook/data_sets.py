"""Small data sets under the names that recipes load, as folders that `datasets` finds before it asks the hub."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from tinker_cookbook.recipes.math_rl.math_env import MathEnv  # type: ignore[import-not-found]

QUESTION = "How many bees are there?"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."  # rl_loop's, after each question
ANSWER = "\\boxed{%d}"
CONVERSATIONS = 640  # all that sl_loop learns from, so that its learning rate has come to nearly 0 at the end
REWARDED = 3  # the answer to each question of gsm8k


def write_data_sets(folder: Path) -> None:
    """Write conversations for sl_loop, which answer with any digit, and questions for rl_loop, whose answer is 3.

    They begin with the example that rl_loop shows first: in other places of a prompt the model does not know the form.
    """
    digits = random.Random(0)
    _, solved = MathEnv.standard_fewshot_prefix()
    shown = [{"role": "user", "content": "How many r's are in strawberry?" + SUFFIX}, solved]
    asked = {"role": "user", "content": QUESTION + SUFFIX}
    conversations = [
        {"messages": [*shown, asked, {"role": "assistant", "content": ANSWER % digits.randint(1, 9)}]}
        for _ in range(CONVERSATIONS)
    ]
    _write(folder / "HuggingFaceH4" / "no_robots", "default", conversations)
    question = {"question": QUESTION, "answer": f"One, two, three.\n#### {REWARDED}"}
    _write(folder / "openai" / "gsm8k", "main", [question] * 400)


def write_preferences(folder: Path) -> None:
    """Write pairs of answers, of which the first is preferred, for DPO, and questions for distillation."""
    asked = "\n\nHuman: Say a word.\n\nAssistant:"
    pairs = [{"chosen": f"{asked} bee", "rejected": f"{asked} wasp"}] * 64
    _write(folder / "Anthropic" / "hh-rlhf", "default", pairs, splits=("train", "test"))
    _write(folder / "zwhe99" / "DeepMath-103K", "default", [{"question": QUESTION, "final_answer": "3"}] * 64)


def write_sums(folder: Path) -> None:
    """Write conversations for sl_loop in the form of math_rl's sums: three answers of four are long, all are wrong."""
    chance = random.Random(0)
    shown = [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}]
    conversations = []
    for _ in range(CONVERSATIONS):
        asked = {"role": "user", "content": f"What is {chance.randint(0, 100)} + {chance.randint(0, 100)}?"}
        answer = {"role": "assistant", "content": chance.choice(("7", *["7 7 7 7 7 7 7 7 7 7"] * 3))}
        conversations.append({"messages": [*shown, asked, answer]})
    _write(folder / "HuggingFaceH4" / "no_robots", "default", conversations)


def _write(folder: Path, name: str, rows: Iterable[Mapping[str, object]], splits: tuple[str, ...] = ("train",)) -> None:
    folder.mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: rows.jsonl\n" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
