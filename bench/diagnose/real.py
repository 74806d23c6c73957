"""Real runs of `bombus demo --tiny`, healthy and with a fault: how they are played, and the figures that are kept.

A hive in real processes trains the tiny model from scratch. Of each step its figures are kept (`real.jsonl.xz`), as
`bombus diagnose` reads them from the log, so that the runs can be diagnosed again without being played again.
"""

import lzma
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import msgspec

from bombus.commands.demo import tiny_job
from bombus.demo import hive
from bombus.demo.games import GameModel, GameTask, Letters, Played
from bombus.demo.player import Player
from bombus.demo.training import Training, TrainingPlan, Watcher
from bombus.insight.runs import read_answers, read_runs
from bombus.replay.diagnosis.findings import FaultKind
from bombus.replay.diagnosis.steps import StepFigures
from bombus.replay.opening import open_source
from bombus.sdk.aio import AsyncSwarmClient

RECORDED = Path(__file__).with_name("real.jsonl.xz")
ONSET = 30  # of faults in what a client does: the model is right in half of its answers, and still learns
KEPT = (
    "entropy", "grad_norm", "clip_fraction", "importance_capped", "kl_sampler", "kl_sampler_first", "kl_sampler_last",
    "kl_sampler_abs", "staleness_mean", "loss", "lr", "episodes", "episodes_cut", "episodes_cut_by_request",
    "updates_left_out",
)  # fmt: skip
Spoil = Callable[["SpoiledLetters", GameModel, GameTask], Awaitable[Played]]


@dataclass(frozen=True)
class RealRun:
    """A run of the demo. `expected` are the kinds that may be its cause: none if it is healthy, or `is_other`: if its
    fault has no kind. What a client does is wrong from step `onset` on; the job is so from the beginning.
    """

    name: str
    expected: tuple[FaultKind, ...] = ()
    is_other: bool = False
    turns: int = 1
    steps: int = 60
    seed: int = 0
    lr: float = 0.0  # 0: that of the demo
    groups: int = 16
    repeat: int = 8
    onset: int = 1
    spoil: Spoil | None = None
    temperature: float | None = None  # from the onset on
    is_evaluated: bool = False

    @property
    def is_healthy(self) -> bool:
        return not self.expected and not self.is_other


class SpoiledLetters(Letters):
    """The game of the demo. Once `is_spoiled`, each episode is played by the fault."""

    def __init__(self, turns: int, spoil: Spoil | None, seed: int) -> None:
        super().__init__(turns)
        self.is_spoiled = False
        self.chance = Random(seed)
        self.rewards = [0.0]  # of all episodes so far
        self._spoil = spoil

    async def rightly(self, model: GameModel, task: GameTask) -> Played:
        played = await super().play(model, task)
        self.rewards.append(played.reward)
        return played

    async def play(self, model: GameModel, task: GameTask) -> Played:
        wrongly = self._spoil if self.is_spoiled else None
        return await (self.rightly(model, task) if wrongly is None else wrongly(self, model, task))


# ---- what a client can do wrong -----------------------------------------------------------------------------------


def _rewarded(change: Callable[[SpoiledLetters, GameTask, float], float]) -> Spoil:
    """Return the fault that replaces the reward of an episode by what `change` makes of it."""

    async def play(game: SpoiledLetters, model: GameModel, task: GameTask) -> Played:
        played = await game.rightly(model, task)
        return Played(reward=change(game, task, played.reward), exact=played.exact)

    return play


def _asked(prompt: Callable[[SpoiledLetters, GameTask], str]) -> Spoil:
    """Return the fault that gives the model another prompt than that of its task."""

    async def play(game: SpoiledLetters, model: GameModel, task: GameTask) -> Played:
        reply = (await model.complete(prompt(game, task), game.SHARE)).text
        reward = reply[: game.SHARE].count(task.answer) / game.SHARE
        return Played(reward=reward, exact=reward == 1.0)

    return play


async def _never_ends(game: SpoiledLetters, model: GameModel, task: GameTask) -> Played:
    """Let the model go on to the limit of the job, and look at the first letters, as if there were no end of text."""
    reply = (await model.complete(f"{task.answer}=", 64)).text
    reward = reply[: game.SHARE].count(task.answer) / game.SHARE
    return Played(reward=reward, exact=reward == 1.0)


async def _cut(game: SpoiledLetters, model: GameModel, task: GameTask) -> Played:
    reply = (await model.complete(f"{task.answer}=", 4)).text
    return Played(reward=reply.count(task.answer) / game.SHARE, exact=False)


async def _agent_fails(game: SpoiledLetters, model: GameModel, task: GameTask) -> Played:
    if game.chance.random() < 0.3:
        return Played(reward=0.0, exact=False)
    return await game.rightly(model, task)


async def _infrastructure_fails(game: SpoiledLetters, model: GameModel, task: GameTask) -> Played:
    if game.chance.random() < 0.4:
        raise aiohttp.ClientConnectionError
    return await game.rightly(model, task)


K = FaultKind
HEALTHY = (
    *(RealRun(f"letters, seed {seed}", seed=seed) for seed in range(4)),
    RealRun("letters in two turns, seed 0", turns=2, steps=110),
    RealRun("letters, a third of the learning rate", lr=1e-3, seed=10, steps=110),
    RealRun("letters, groups of 4", repeat=4, seed=12),
    RealRun("letters, groups of 16", repeat=16, groups=8, seed=13),
)  # fmt: skip
FAULTY = (
    RealRun("learning rate 1e-8", (K.LR_TOO_LOW,), lr=1e-8, steps=30),
    RealRun("learning rate 0.1", (K.LR_TOO_HIGH, K.NOT_FINITE), lr=0.1, steps=30),
    RealRun("learning rate 0.006, at which some letters stay wrong", (K.DUPLICATE_ANSWERS,), lr=6e-3, seed=11),
    RealRun("learning rate 0.02", (K.LR_TOO_HIGH, K.NOT_FINITE), lr=0.02),
    RealRun("answers cut at 4 tokens by their request", (K.TRUNCATED,), onset=ONSET, spoil=_cut),
    RealRun("every reward is 0.5", (K.TOO_HARD, K.TOO_EASY), onset=ONSET, spoil=_rewarded(lambda *_: 0.5)),
    RealRun("every reward is 1", (K.TOO_EASY, K.REWARD_JUMPS), onset=ONSET, spoil=_rewarded(lambda *_: 1.0)),
    RealRun("the sign of the reward is wrong", (K.REWARD_INVERTED,), onset=ONSET,
        spoil=_rewarded(lambda game, task, reward: 1.0 - reward)),
    RealRun("one reward of 50 is 50 times as large", (K.REWARD_OUT_OF_RANGE,), onset=ONSET,
        spoil=_rewarded(lambda game, task, reward: reward * (50.0 if game.chance.random() < 0.02 else 1.0))),
    RealRun("temperature 0.1", (K.DUPLICATE_ANSWERS,), onset=15, temperature=0.1),
    RealRun("a cache gives every task one prompt", (K.CONSTANT_ANSWER,), onset=ONSET,
        spoil=_asked(lambda game, task: "a=")),
    RealRun("the prompt has the answer", (K.LEAKED_ANSWER,), onset=ONSET,
        spoil=_asked(lambda game, task: f"{task.answer}={task.answer * game.SHARE}{task.answer}=")),
    RealRun("agents fail and get the reward 0", (K.FAILURES_REWARDED,), onset=ONSET, spoil=_agent_fails),
    RealRun("clients abort", (K.EPISODES_ABORTED,), onset=ONSET, spoil=_infrastructure_fails),
    RealRun("evaluated on what is trained", (K.EVALUATED_ON_TRAINED,), is_evaluated=True),
    RealRun("rewards are those of other episodes", (K.REWARD_DISAGREES,), onset=ONSET,
        spoil=_rewarded(lambda game, task, reward: game.chance.choice(game.rewards[-512:]))),
    RealRun("the judge is wrong three times in ten", (K.REWARD_DISAGREES,), onset=ONSET,
        spoil=_rewarded(lambda game, task, reward: 1.0 - reward if game.chance.random() < 0.3 else reward)),
    # ---- those that have no kind
    RealRun("prompts are mixed up", is_other=True, onset=ONSET,
        spoil=_asked(lambda game, task: f"{game.chance.choice(game.letters)}=")),
    RealRun("prompts lose their beginning", is_other=True, onset=ONSET, spoil=_asked(lambda game, task: "=")),
    RealRun("another template", is_other=True, onset=ONSET,
        spoil=_asked(lambda game, task: f"<|user|>{task.answer}<|end|>")),
    RealRun("one task has 20 times the reward", is_other=True, onset=ONSET,
        spoil=_rewarded(lambda game, task, reward: reward * (20.0 if task.answer == "c" else 1.0))),
    RealRun("no end of text is sampled", is_other=True, onset=ONSET, spoil=_never_ends),
)  # fmt: skip
RUNS = {run.name: run for run in (*HEALTHY, *FAULTY)}


# ---- playing and keeping ------------------------------------------------------------------------------------------


async def play(run: RealRun, number: int, folder: Path, url: str) -> "Recorded":
    """Play a run, the first, second or `number`th one of a hive, and return its figures."""
    rate, updates, temperature = (3e-3, 1, 1.0) if run.turns == 1 else (5e-4, 4, 1.4)
    plan = TrainingPlan(batch_size=run.groups, num_repeat=run.repeat, seed=run.seed, temperature=temperature)
    job = tiny_job(plan, run.lr or rate, updates, f"run-{number}")
    game = SpoiledLetters(run.turns, run.spoil, run.seed)
    async with AsyncSwarmClient(url) as client:
        await client.auto_sync_train_config_and_start_engine(job, force_restart=number > 1)
        training = Training(Player(client, game), plan, Watcher(), 0.0)
        try:
            for step in range(1, run.steps + 1):
                if step == run.onset:
                    game.is_spoiled = True
                    if run.temperature is not None:
                        training.plan = msgspec.structs.replace(plan, temperature=run.temperature)
                if run.is_evaluated and step % 5 == 1:
                    await training.measure()
                await training.step()
            await client.begin_episodes(1)  # which is granted once the last batch is trained
        finally:
            await training.player.close()
    async with open_source(Namespace(nats=None, data=folder / "hive", log=None, hive=None)) as source:
        series = (await read_runs(source)).newest(f"main-{number}", source.title)
        await read_answers(source, series.steps)
    for row in series.steps:
        row.sampled, row.trainer = [], {name: row.trainer[name] for name in KEPT if name in row.trainer}
    return Recorded(run.name, series.job.to_json(), series.steps)


class Recorded(msgspec.Struct):
    """A run that was played, with its job as JSON."""

    name: str
    job: str
    steps: list[StepFigures]


def load() -> list[Recorded]:
    decoder = msgspec.json.Decoder(Recorded, dec_hook=lambda of, value: of(value))  # a Counter
    return decoder.decode_lines(lzma.decompress(RECORDED.read_bytes()))


async def record(names: Sequence[str]) -> None:
    """Play runs on one hive, all or those with these names, and keep their figures instead of earlier ones."""
    kept = {each.name: each for each in load()} if RECORDED.exists() else {}
    with TemporaryDirectory() as folder:
        async with hive.running(Path(folder), threads=1) as url:
            for number, name in enumerate(names or RUNS, 1):
                played = kept[name] = await play(RUNS[name], number, Path(folder), url)
                print(f"{name}: {len(played.steps)} steps, reward {played.steps[-1].rewards.mean:.3f}", flush=True)
                lines = [
                    msgspec.json.encode(_rounded(msgspec.to_builtins(kept[each]))) for each in RUNS if each in kept
                ]
                RECORDED.write_bytes(lzma.compress(b"\n".join(lines), preset=9))


def _rounded(value: Any) -> Any:
    """Round the numbers in a tree to five digits, which changes no finding."""
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {name: _rounded(each) for name, each in value.items()}
        case list() | tuple():
            return [_rounded(each) for each in value]
    return value
