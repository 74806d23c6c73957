"""GRPO from scratch on one tiny task: our engine and trainer in one process beside TRL's GRPOTrainer, in turn.

The task: the prompt is a letter and `=`, the reward the share of eight sampled tokens that are that letter. Both begin
with the same weights. TRL runs in an environment of its own:

python -m venv .venv-trl && .venv-trl/bin/pip install torch==2.13.0 trl==1.16.0
python -m bench.grpo --trl .venv-trl/bin/python --seeds 20 --entropy 0.03

Runs differ more than trainers do: compare the numbers of steps by the rank test that is printed last, over 20 seeds or
more. A run that does not arrive within `--steps` counts as the longest.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bombus.config.job import validated
from bombus.hive.generation import Finished, Generate, Tokens
from bombus.hive.records import CallRecord, Choice, SamplingParams, Span, pack_tokens, unpack_tokens
from bombus_inference.backends.torch.backend import load_policy
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.settings import ComputeSettings
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.data.batch import EpisodeCalls, EpisodeGroup
from bombus_trainer.settings import TrainerSettings

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz=.0123456"
TOKENS = 8
WINDOW = 10  # steps over which a reward is averaged
GOAL = 0.9
SHUFFLES = 20_000
TRL_SCRIPT = Path(__file__).with_name("grpo_trl.py")


def build(folder: Path, seed: int) -> None:
    """Save a two-layer Llama of some 0.4 million parameters, with one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((PAD, EOS, *CHARACTERS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS).save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def reward(letter: int, tokens: list[int]) -> float:
    return sum(token == letter for token in tokens) / TOKENS


def play(engine: Engine, letters: list[int], group: int, step: int) -> tuple[list[EpisodeGroup], float]:
    """Sample one group for each letter. Returns the groups and the mean reward."""
    equals = CHARACTERS.index("=") + 2
    sampling = SamplingParams(max_tokens=TOKENS, stop_token_ids=(1,))
    for ticket, letter in enumerate(letters):
        prompt = pack_tokens([letter, equals])
        engine.add(ticket, Generate(id="", engine="main", run=1, prompt=prompt, sampling=sampling, n=group))
    parts: dict[tuple[int, int], Tokens] = {}
    while engine.has_work:
        for output in engine.step():
            for frame in output.frames:
                assert isinstance(frame, Tokens | Finished)
                if isinstance(frame, Tokens):
                    parts[output.ticket, frame.choice] = frame
    groups, rewards = [], []
    for ticket, letter in enumerate(letters):
        episodes = []
        for number in range(group):
            made = parts[ticket, number]
            got = reward(letter, unpack_tokens(made.tokens))
            name = f"{step}-{ticket}-{number}"
            choice = Choice(made.tokens, made.logprobs, (Span(made.version, 0, len(made.tokens) // 4),))
            record = CallRecord(
                id=name,
                engine="main",
                run=1,
                episode=name,
                prompt_tail=pack_tokens([letter, equals]),
                prompt_tokens=2,
                choices=(choice,),
                sampling=sampling,
            )
            episodes.append(EpisodeCalls(name, got, (record,)))
            rewards.append(got)
        groups.append(EpisodeGroup(str(ticket), tuple(episodes)))
    return groups, statistics.fmean(rewards)


def ours(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    trainer = {
        "lr": arguments.lr,
        "weight_decay": 0.0,
        "grad_clip": 1.0,
        "loss_aggregation": "token",
        "entropy_coef": arguments.entropy,
    }
    job = validated({"model": {"dtype": "float32", "seed": arguments.seed}, "trainer": trainer}, {})
    executor = Executor(folder, TrainerSettings(job=job))
    limits = ComputeSettings(kv_cache_bytes=64 << 20, max_model_len=64, max_running=256)
    engine = Engine(load_policy(folder, limits), limits, run=1, version=0)
    numbers = random.Random(arguments.seed)
    curve: list[tuple[float, float]] = []
    started = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        letters = [2 + numbers.randrange(arguments.letters) for _ in range(arguments.prompts)]
        groups, mean = play(engine, letters, arguments.group, step)
        curve.append((time.perf_counter() - started, mean))
        executor.train_step(groups, step)
        engine.swap_weights(dict(executor.policy.dense_weights()), step, 1)
        if reached(curve) is not None and step >= arguments.least:
            break
    return report(curve, time.perf_counter() - started)


def reached(curve: list[tuple[float, float]]) -> tuple[float, int] | None:
    """Return seconds and steps until the mean of the last `WINDOW` rewards reached the goal."""
    for end in range(WINDOW, len(curve) + 1):
        if statistics.fmean(mean for _, mean in curve[end - WINDOW : end]) >= GOAL:
            return curve[end - 1][0], end
    return None


def report(curve: list[tuple[float, float]], seconds: float) -> dict[str, Any]:
    hit = reached(curve)
    last = statistics.fmean(mean for _, mean in curve[-WINDOW:])
    goal = {"goal_s": None, "goal_steps": None} if hit is None else {"goal_s": hit[0], "goal_steps": hit[1]}
    return {"steps_per_s": len(curve) / seconds, "last_reward": last, **goal}


def one(python: str, script: list[str], folder: Path, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [python, *script, "--folder", str(folder), "--seed", str(seed)]
    for name in ("steps", "least", "prompts", "group", "lr", "threads", "letters"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(arguments: argparse.Namespace) -> None:
    ours = [sys.executable, "-m", "bench.grpo", "--ours"]
    contestants = {"bombus": ours}
    if arguments.entropy:
        contestants["bombus, entropy"] = [*ours, "--entropy", str(arguments.entropy)]
    if arguments.trl:
        contestants["TRL"] = [arguments.trl, "-P", str(TRL_SCRIPT)]  # -P: this folder has a vllm.py
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    print("| seed | who | steps/s | steps to 0.9 | seconds to 0.9 | last reward |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="bombus-grpo-") as place:
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            folder = Path(place) / str(seed)
            build(folder, seed)
            for name, (python, *script) in contestants.items():
                result = one(python, script, folder, seed, arguments)
                found[name].append(result)
                goal = "-" if result["goal_s"] is None else f"{result['goal_s']:.1f}"
                print(
                    f"| {seed} | {name} | {result['steps_per_s']:.2f} | {result['goal_steps'] or '-'} | {goal} "
                    f"| {result['last_reward']:.3f} |",
                    flush=True,
                )
    summarise(found)


def summarise(found: dict[str, list[dict[str, Any]]]) -> None:
    """Print medians, and how probable such a difference from the first is by chance."""
    first, *others = found
    print("\n| who | arrived | median steps to 0.9 | median steps/s | p, beside " + first + " |\n|---|---|---|---|---|")
    steps = {name: [result["goal_steps"] or float("inf") for result in results] for name, results in found.items()}
    for name, results in found.items():
        arrived = sum(each < float("inf") for each in steps[name])
        rate = statistics.median(result["steps_per_s"] for result in results)
        chance = f"{rank_test(steps[first], steps[name]):.2f}" if name in others else ""
        print(f"| {name} | {arrived}/{len(results)} | {statistics.median(steps[name])} | {rate:.2f} | {chance} |")


def rank_test(one: list[float], other: list[float]) -> float:
    """Return the two-sided p-value of Wilcoxon's rank-sum test, from random permutations.

    It is the probability that two sets of one distribution have ranks that differ at least as much.
    """
    values = sorted([*one, *other])
    # Equal values share the mean of their ranks.
    rank = {value: values.index(value) + (values.count(value) - 1) / 2 for value in set(values)}
    ranks = [rank[value] for value in (*one, *other)]
    expected = len(one) * (len(ranks) - 1) / 2
    seen = abs(sum(ranks[: len(one)]) - expected)
    numbers = random.Random(0)
    as_far = 0
    for _ in range(SHUFFLES):
        numbers.shuffle(ranks)
        as_far += abs(sum(ranks[: len(one)]) - expected) >= seen - 1e-9
    return (as_far + 1) / (SHUFFLES + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="the Python of an environment with TRL")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs of each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--entropy", type=float, default=0.0, help="also run ours with an entropy bonus of this weight")
    parser.add_argument("--ours", action="store_true", help="one run of ours on the model in --folder")
    add_task_arguments(parser)
    arguments = parser.parse_args()
    if not arguments.ours:
        compare(arguments)
        return
    torch.set_num_threads(arguments.threads)
    print(json.dumps(ours(arguments.folder, arguments)))


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="at most (default: %(default)s)")
    parser.add_argument("--least", type=int, default=60, help="steps, however early the goal is (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--letters", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)


if __name__ == "__main__":
    main()
