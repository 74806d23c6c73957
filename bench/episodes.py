"""Episodes per second, end to end: the tiny one-turn task through a whole hive, and in one process without any of it.

Also the memory of the hive's gateway, which serves one episode after another.

The process alone does what a trainer library does: `generate` of transformers, a padded batch, one AdamW step. Same
model, same task, 16 letters x 8 episodes a step, one torch thread for each process.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.processes import process_of
from bombus import AsyncSwarmClient
from bombus.commands.demo import tiny_job
from bombus.demo import hive
from bombus.demo.games import Letters
from bombus.demo.player import Player
from bombus.demo.training import Stepped, Training, TrainingPlan, Watcher
from bombus.weights.models import TINY, resolve_model

TASKS, REPEAT, TOKENS = 16, 8, Letters.SHARE
WARM_STEPS = 5
RATE = 3e-3


class MemoryWatcher(Watcher):
    """Notes the resident memory of the gateway, in MB, after each step."""

    def __init__(self) -> None:
        self._gateway = psutil.Process(process_of(os.getpid(), "gateway"))
        self.mb: list[float] = []

    def stepped(self, step: Stepped) -> None:
        self.mb.append(self._gateway.memory_info().rss / 1e6)


async def through_a_hive(seconds: float) -> float:
    plan = TrainingPlan(batch_size=TASKS, num_repeat=REPEAT, train_s=seconds, measure=False)
    with tempfile.TemporaryDirectory() as folder:
        async with hive.running(Path(folder), threads=1) as url, AsyncSwarmClient(url) as client:
            await client.auto_sync_train_config_and_start_engine(tiny_job(plan, RATE))
            player, watcher = Player(client, Letters()), MemoryWatcher()
            try:
                steps = (await Training(player, plan, watcher, time.monotonic()).run()).steps
            finally:
                await player.close()
    episodes = sum(step.episodes for step in steps)
    print(f"memory of the gateway   {watcher.mb[0]:6.1f} MB   after {steps[0].episodes} episodes", flush=True)
    print(f"memory of the gateway   {watcher.mb[-1]:6.1f} MB   after {episodes} episodes", flush=True)
    warm, last = steps[WARM_STEPS - 1], steps[-1]
    return sum(step.episodes for step in steps[WARM_STEPS:]) / (last.training_s - warm.training_s)


def alone(seconds: float) -> float:
    folder = resolve_model(TINY)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    letters = Letters().letters
    prompts = [f"{letter}=" for letter in letters for _ in range(REPEAT)]
    prompt_ids = tokenizer(prompts, return_tensors="pt")["input_ids"]
    wanted = prompt_ids[:, :1]
    length = prompt_ids.shape[1]
    stops = torch.tensor(model.generation_config.eos_token_id)

    def step() -> None:
        with torch.no_grad():
            ids = model.generate(prompt_ids, do_sample=True, top_k=0, max_new_tokens=TOKENS)
        sampled = ids[:, length:]
        stopped = torch.isin(sampled, stops).long()
        mask = stopped.cumsum(1) - stopped == 0  # up to and including the stop token
        rewards = ((sampled == wanted) & mask).sum(1) / TOKENS
        groups = rewards.view(TASKS, REPEAT)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        logprobs = model(ids).logits[:, length - 1 : -1].log_softmax(-1).gather(2, sampled[:, :, None])[:, :, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -(ratio * advantages * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(WARM_STEPS):
        step()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        step()
        steps += 1
    return steps * TASKS * REPEAT / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="for each of the two")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    without = alone(seconds)
    print(f"one process, no hive   {without:6.0f} episodes/s", flush=True)
    within = asyncio.run(through_a_hive(seconds))
    print(f"through the hive       {within:6.0f} episodes/s   {within / without:.2f} of it")


if __name__ == "__main__":
    main()
