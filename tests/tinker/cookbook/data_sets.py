"""Small data sets under the names that recipes load, as folders that `datasets` finds before it asks the hub."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

QUESTION = "How many bees are there?"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."  # rl_loop's, after each question
ANSWER = "\\boxed{%d}"
REWARDED = 3  # the answer to each question of gsm8k


def write_data_sets(folder: Path) -> None:
    """Write conversations for sl_loop, which answer with any digit, and questions for rl_loop, whose answer is 3."""
    digits = random.Random(0)
    asked = {"role": "user", "content": QUESTION + SUFFIX}
    conversations = [
        {"messages": [asked, {"role": "assistant", "content": ANSWER % digits.randint(1, 9)}]} for _ in range(1600)
    ]
    _write(folder / "HuggingFaceH4" / "no_robots", "default", conversations)
    question = {"question": QUESTION, "answer": f"One, two, three.\n#### {REWARDED}"}
    _write(folder / "openai" / "gsm8k", "main", [question] * 400)


def write_sums(folder: Path) -> None:
    """Write conversations for sl_loop in the form of math_rl's sums: three answers of four are long, all are wrong."""
    chance = random.Random(0)
    shown = [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}]
    conversations = []
    for _ in range(1600):
        asked = {"role": "user", "content": f"What is {chance.randint(0, 100)} + {chance.randint(0, 100)}?"}
        answer = {"role": "assistant", "content": chance.choice(("7", *["7 7 7 7 7 7 7 7 7 7"] * 3))}
        conversations.append({"messages": [*shown, asked, answer]})
    _write(folder / "HuggingFaceH4" / "no_robots", "default", conversations)


def _write(folder: Path, name: str, rows: Iterable[Mapping[str, object]]) -> None:
    folder.mkdir(parents=True)
    split = "  - split: train\n    path: train.jsonl"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{split}\n---\n")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
