"""TRL's side of `bench.grpo`. It is run by the Python of an environment with TRL, and prints one line of JSON."""

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

CHARACTERS = "abcdefghijklmnopqrstuvwxyz=.0123456"
TOKENS, WINDOW, GOAL = 8, 10, 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("seed", "steps", "least", "prompts", "group", "letters", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32)
    numbers = random.Random(arguments.seed)
    count = arguments.steps * arguments.prompts
    prompts = [CHARACTERS[numbers.randrange(arguments.letters)] + "=" for _ in range(count)]
    curve: list[tuple[float, float]] = []
    started = 0.0

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        letters = [CHARACTERS.index(prompt[0]) + 2 for prompt in prompts]
        rewards = [sum(t == letter for t in ids) / TOKENS for letter, ids in zip(letters, completion_ids)]
        curve.append((time.perf_counter() - started, statistics.fmean(rewards)))
        return rewards

    def hit() -> tuple[float, int] | None:
        for end in range(WINDOW, len(curve) + 1):
            if statistics.fmean(mean for _, mean in curve[end - WINDOW : end]) >= GOAL:
                return curve[end - 1][0], end
        return None

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            if hit() is not None and len(curve) >= arguments.least:
                control.should_training_stop = True  # type: ignore[attr-defined]

    samples = arguments.prompts * arguments.group
    config = GRPOConfig(
        output_dir=str(arguments.folder / "trl"),
        use_cpu=True,
        bf16=False,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        num_generations=arguments.group,
        max_completion_length=TOKENS,
        max_steps=arguments.steps,
        beta=0.0,
        temperature=1.0,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        seed=arguments.seed,
        gradient_checkpointing=False,
        disable_tqdm=True,
        max_grad_norm=1.0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Stop()],
    )
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    goal = hit()
    print(
        json.dumps(
            {
                "steps_per_s": len(curve) / seconds,
                "last_reward": statistics.fmean(mean for _, mean in curve[-WINDOW:]),
                "goal_s": goal and goal[0],
                "goal_steps": goal and goal[1],
            }
        )
    )


if __name__ == "__main__":
    main()
