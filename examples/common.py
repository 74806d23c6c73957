"""What the examples share: their flags, and a job for a model that fits a laptop."""

import argparse

from bombus import Job

TUNING = {
    "tiny": {"lr": 2e-3},
    "smollm2": {"lr": 1e-4, "lora_rank": 16, "lora_alpha": 32},
}


def arguments(about: str, model: str = "tiny") -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--url", default="http://127.0.0.1:10086", help="of a hive; start one with `bombus up`")
    parser.add_argument("--model", default=model, choices=sorted(TUNING), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to train for (default: %(default)s)")
    return parser.parse_args()


def job(model: str, batch_size: int, num_repeat: int, max_model_len: int = 512) -> Job:
    """`batch_size` tasks, `num_repeat` episodes each, make one optimizer step."""
    return Job(model=model, batch_size=batch_size, num_repeat=num_repeat, max_model_len=max_model_len, **TUNING[model])
