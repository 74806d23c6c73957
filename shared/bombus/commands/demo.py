"""`bombus demo`: starts a hive, trains a model in it, and draws its learning curve."""

import argparse
import asyncio
import secrets
import shutil
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePath

from bombus.config.flags import check_range
from bombus.demo.folder import DemoOf, Keeper, load_curve, open_folder
from bombus.demo.games import Game, Letters, Needle
from bombus.demo.training import Curve, TrainingPlan, is_over
from bombus.errors import BombusError, Code, Refused
from bombus.insight.charts import SCHEMA, Spec
from bombus.insight.drawing import drawn
from bombus.private import private_folder
from bombus.sdk.job import Job
from bombus.terminal import complain, say
from bombus.weights.models import SMOLLM2, hub_name

BEGAN = time.monotonic()
SEED_MAX = (1 << 63) - 1
MINUTES_MIN = 0.01
MINUTES_MAX = 24 * 60
TINY_THRESHOLDS = (0.5, 0.8, 0.9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--tiny", action="store_true", help="train a model of 0.4 M parameters from scratch, on two tasks"
    )
    model.add_argument(
        "--model",
        default=SMOLLM2,
        metavar="FOLDER",
        help="the model: a folder written by `save_pretrained`, with any name (default: %(default)s, SmolLM2-135M)",
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of everything random (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=None, help="the longest training time (default: 5, or 2 with --tiny)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        metavar="DIR",
        help="the folder for everything it writes; a stopped demo resumes there (default: runs/demo-<time>)",
    )
    parser.add_argument(
        "--url",
        default="",
        help="a running hive, such as one started by `bombus up --data-dir DIR/hive`: only the client is started",
    )
    parser.add_argument(
        "--turns",
        type=int,
        choices=(1, 2),
        default=None,
        help="with --tiny: only the game with this number of turns (default: both)",
    )


def run(arguments: argparse.Namespace) -> int:
    out = arguments.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    check_range("--seed", arguments.seed, 0, SEED_MAX)
    minutes = arguments.minutes if arguments.minutes is not None else (2.0 if arguments.tiny else 5.0)
    check_range("--minutes", minutes, MINUTES_MIN, MINUTES_MAX)
    model = _found(arguments.model)
    if arguments.url and arguments.tiny and not arguments.turns:
        raise Refused(Code.BAD_CONFIG, "--url with --tiny needs --turns: each of the two games has its own hive")
    demo = DemoOf("tiny" if arguments.tiny else model, arguments.seed, secrets.token_hex(4))
    if earlier := open_folder(out, demo):
        demo = earlier
        say(f"{out} contains an earlier demo, which now resumes")
    try:
        if arguments.tiny:
            turns = [arguments.turns] if arguments.turns else [1, 2]
            return max(_tiny(_Place(out / f"tiny-{count}", demo, arguments.url), count, minutes) for count in turns)
        return _main(_Place(out, demo, arguments.url), model, minutes)
    except KeyboardInterrupt:
        complain(f"bombus demo: stopped; the same command with --out {out} resumes where it stopped")
        raise
    except BombusError as error:
        complain(*f"bombus demo: {error}".split("\n"))  # the end of a log, already escaped
        return 1


@dataclass(frozen=True)
class _Place:
    """Where a game is trained: the folder, the demo, and the URL of the hive, or "" if the demo starts its own hive."""

    folder: Path
    demo: DemoOf
    url: str = ""


def _found(model: str) -> str:
    """Return `smollm2`, or the absolute path of a model's folder. Raises `Refused` if there is no model there."""
    if model == SMOLLM2:
        return model
    folder = Path(model).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise Refused(Code.BAD_CONFIG, f"there is no model at {folder}: a model's folder must have a config.json")
    return str(folder)


# ---- the tiny model ---------------------------------------------------------------------------------------------


def tiny_job(plan: TrainingPlan, rate: float, updates: int = 1, experiment: str = "demo") -> Job:
    """Return a job that trains the tiny model from scratch, with `updates` optimizer steps for each batch."""
    return Job(
        model="tiny",
        experiment_name=experiment,
        batch_size=plan.batch_size,
        num_repeat=plan.num_repeat,
        max_prompt_length=256,
        max_response_length=200,
        max_response_length_in_one_turn=64,
        max_model_len=512,
        lr=rate,
        mini_batch_num=updates,
        bombus={"model": {"seed": plan.seed}, "trainer": {"weight_decay": 0.0, "loss_aggregation": "token"}},
    )


def _tiny(place: _Place, turns: int, minutes: float) -> int:
    seed = place.demo.seed
    began = BEGAN if turns == 1 else time.monotonic()
    game = Letters(turns)
    # The game of two turns needs small updates and a higher temperature: otherwise the model settles on the wrong
    # letter for some pairs, all their rewards are equal, and there is nothing left to learn from.
    rate, updates, temperature = (3e-3, 1, 1.0) if turns == 1 else (5e-4, 4, 1.4)
    goal = TINY_THRESHOLDS[-1]
    plan = TrainingPlan(
        batch_size=16,
        num_repeat=8,
        seed=seed,
        train_s=60 * minutes,
        temperature=temperature,
        stop_at=goal,
        measure=False,
    )
    job = tiny_job(plan, rate, updates, place.demo.experiment(f"tiny-{turns}"))
    curve, _ = _Demo(place, game, job, plan, began, threads=1).train()
    say("", f"{game.title} ({turns} turn{'s' if turns > 1 else ''}, from scratch, seed {seed})")
    for threshold in TINY_THRESHOLDS:
        say("  " + _threshold_line(curve, threshold))
    steps, seconds = len(curve.steps), curve.steps[-1].training_s
    episodes = sum(step.episodes for step in curve.steps)
    say(f"  {steps} steps, {episodes} episodes, {episodes / seconds:.0f} episodes per second of training")
    if curve.smoothed() >= goal:
        return 0
    say(
        f"  reward {goal} was not reached in {minutes:g} minutes of training, which can be too short on a slow or busy "
        f"machine: try `bombus demo --tiny --turns {turns} --minutes {2 * minutes:g}`"
    )
    return 1


def _threshold_line(curve: Curve, threshold: float) -> str:
    seconds = curve.seconds_to(threshold, lambda step: step.wall_s)
    trained = curve.seconds_to(threshold, lambda step: step.training_s)
    if seconds is None or trained is None:
        return f"reward {threshold}: not reached"
    return f"reward {threshold}: {seconds:5.1f} s from the start, {trained:5.1f} s of training"


# ---- the bundled model, or another one --------------------------------------------------------------------------


def needle_job(model: str, plan: TrainingPlan, experiment: str) -> Job:
    """Return a job that trains LoRA adapters for any instruct model. `model` is a name or a folder."""
    return Job(
        model=model,
        experiment_name=experiment,
        batch_size=plan.batch_size,
        num_repeat=plan.num_repeat,
        max_prompt_length=256,
        max_response_length=32,
        max_response_length_in_one_turn=32,
        max_model_len=512,
        lr=3e-4,
        lora_rank=16,
        lora_alpha=32,
        lora_load_format="safetensors",
        bombus={
            "model": {"seed": plan.seed},
            "trainer": {"weight_decay": 0.0, "warmup_steps": 3, "loss_aggregation": "token"},
        },
    )


def _main(place: _Place, model: str, minutes: float) -> int:
    seed = place.demo.seed
    game = Needle()
    plan = TrainingPlan(batch_size=8, num_repeat=8, seed=seed, train_s=60 * minutes)
    job = needle_job(model, plan, place.demo.experiment("needle"))
    reply, constant = game.constant_reply()
    curve, weights = _Demo(place, game, job, plan, BEGAN).train()
    picture = place.folder / "reward.png"
    title = f"{PurePath(hub_name(model) or model).name} on needle_haystack, seed {seed}"
    picture.write_bytes(drawn(_chart(curve, title, constant), "png"))
    first, last = curve.measured[0], curve.measured[-1]
    say("", f"{game.title}, seed {seed}")
    say(f"{len(game.held_out())} held-out questions; none of their names occurs in training")
    say(f"  {'':28}  reward  exact")
    say(f"  {'base model':28}  {first.reward:6.3f}  {first.exact:5.3f}")
    hits = sum(task.answer == reply for task in game.held_out()) / len(game.held_out())
    say(f"  {f'best constant reply ({reply})':28}  {constant:6.3f}  {hits:5.3f}")
    always, placed, placed_hits = game.positional_reply()
    say(f"  {f'always {always}':28}  {placed:6.3f}  {placed_hits:5.3f}")
    for point in curve.measured[1:]:
        say(f"  {f'after {point.training_s:.0f} s of training':28}  {point.reward:6.3f}  {point.exact:5.3f}")
    say("", *game.summary(first.kinds, last.kinds).split("\n"))
    say("", f"{len(curve.steps)} batches. Picture: {picture}")
    say(f"Weights (load them with transformers): {weights}" if weights else "`bombus export` writes the weights.")
    return 0


# ---- both -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Demo:
    """One hive and the training in it. `began` is when the command started, on the monotonic clock; `threads` is the
    number of CPU threads that torch uses, or 0 for one per core."""

    place: _Place
    game: Game
    job: Job
    plan: TrainingPlan
    began: float
    threads: int = 0

    def train(self) -> tuple[Curve, Path | None]:
        """Do the rest of the training in a hive, and keep the weights.

        Returns the curve and the folder of the newest weights, or None for the folder if the hive runs elsewhere.
        """
        curve, kept = load_curve(self.place.folder), self.place.folder / "model"
        if curve is not None and kept.is_dir() and is_over(self.plan, curve, curve.trained_s()):
            return curve, kept
        return asyncio.run(self._train(curve))

    async def _train(self, earlier: Curve | None) -> tuple[Curve, Path | None]:
        from bombus.demo.display import Display
        from bombus.demo.player import Player
        from bombus.demo.training import Training
        from bombus.sdk.aio import AsyncSwarmClient

        folder, curve = self.place.folder, earlier or Curve()
        with Display(self.game.title, self.plan.train_s, every=1 if self.plan.measure else 10) as display:
            display.show("starting the hive")
            async with self._hive() as url, AsyncSwarmClient(url) as client:
                display.show("loading the model")
                # An interrupted run has open episodes that nobody plays. The new run begins where that one stopped.
                await client.auto_sync_train_config_and_start_engine(self.job, force_restart=earlier is not None)
                player = Player(client, self.game)
                training = Training(player, self.plan, Keeper(folder, curve, display), self.began)
                training.go_on(curve, await client.get_global_step())
                display.go_on(curve)
                try:
                    await training.run()
                finally:
                    await player.close()
                weights = _keep_weights(folder)
        return curve, weights

    def _hive(self) -> AbstractAsyncContextManager[str]:
        """Start a hive, or use the running one. The context manager yields its URL."""
        from bombus.demo import hive

        private_folder(self.place.folder)
        return nullcontext(self.place.url) if self.place.url else hive.running(self.place.folder, self.threads)


def _keep_weights(out: Path) -> Path | None:
    """Copy the newest version, with any adapter merged, out of the hive's folder, which keeps only two versions."""
    from bombus.weights.adapters import ADAPTER_FILE
    from bombus.weights.merging import save_merged

    files = (out / "hive" / "engines").rglob("version-*/*.safetensors")
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return None
    kept = out / "model"
    shutil.rmtree(kept, ignore_errors=True)
    if newest.name == ADAPTER_FILE:
        (base,) = newest.parent.parent.glob("base-*")
        save_merged(base, newest.parent, kept)
    else:
        shutil.copytree(newest.parent, kept)
    return kept


def _chart(curve: Curve, title: str, constant: float) -> Spec:
    """Return the batch and held-out rewards over seconds of training, beside the base model and the best constant
    reply."""
    measured = [point.training_s for point in curve.measured]
    lines = {
        "training batches": [(step.training_s, step.reward) for step in curve.steps],
        "held-out reward": [(point.training_s, point.reward) for point in curve.measured],
        "held-out, exactly right": [(point.training_s, point.exact) for point in curve.measured],
        "base model": [(second, curve.measured[0].reward) for second in measured],
        "best constant reply": [(second, constant) for second in measured],
    }
    values = [{"x": x, "y": y, "line": name} for name, points in lines.items() for x, y in points]
    return {
        "$schema": SCHEMA,
        "title": title,
        "width": 720,
        "height": 360,
        "data": {"values": values},
        "mark": {"type": "line", "point": {"size": 16}},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": "seconds of training"},
            "y": {"field": "y", "type": "quantitative", "title": "reward", "scale": {"domain": [0, 1]}},
            "color": {"field": "line", "type": "nominal", "title": None, "sort": list(lines)},
        },
    }
