"""TextArena's games as ready tasks. They need an environment of their own: `pip install 'bombus[textarena]'`."""

import asyncio
import json
import random
import re
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("textarena")

from bombus.cli import main
from bombus.environments.chat_model import ChatAnswer, NoModelAnswer
from bombus.environments.kinds import EnvironmentLost
from bombus.environments.plain.play import PlayAgents
from bombus.environments.rollout import Rollout
from bombus.errors import Refused
from bombus.sdk.types import Credentials, Task
from bombus.tasks.kinds import TaskDraw, TaskSplit
from bombus.tasks.registry import FAMILIES, open_tasks
from bombus.tasks.textgames import FLAWS, ArenaMatch, _plain, fewest_players
from tests.tasks.model_server import Conversation, model_server

GUESSING = "textarena:GuessTheNumber-v0"
TIC_TAC_TOE = "textarena:TicTacToe-v0"


def halves(messages: Conversation) -> str:
    """A model that finds a number by halving."""
    low, high = 1, 20
    guesses = [
        int(found[1])
        for each in messages
        if each["role"] == "assistant"
        if (found := re.search(r"(\d+)", each["content"]))
    ]
    hints = [each["content"] for each in messages if each["role"] == "user"][1:]
    for guess, hint in zip(guesses, hints):
        low, high = (guess + 1, high) if "higher" in hint else (low, guess - 1)
    return f"[{(low + high) // 2}]"


def first_free(messages: Conversation) -> str:
    """A model that takes the first square that is free."""
    squares = re.findall(r"'\[(\d)\]'", messages[-1]["content"].rpartition("Available Moves")[2])
    return f"[{squares[0]}]"


def played(task: str, words: list[str], url: str, out: Path) -> list[dict[str, object]]:
    assert main(["run", "--task", task, "--engine", url, "--out", str(out), *words]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_model_that_plays_well_wins_alone(tmp_path: Path) -> None:
    with model_server(halves) as url:
        scores = played(GUESSING, ["-n", "4"], url, tmp_path / "out")
    assert [(score["reward"], score["is_success"], score["status"]) for score in scores] == [
        (1.0, True, "completed")
    ] * 4


async def test_each_call_has_the_reward_of_its_player() -> None:
    with model_server(first_free) as url:
        tasks = open_tasks(TIC_TAC_TOE)
        rollout = Rollout(tasks.environment, tasks.budgets)
        credentials = Credentials(base_url=f"{url}/v1", api_key="k", model="scripted", episode_uuid="")
        result = await rollout.play(tasks.draw(TaskDraw(size=1))[0], credentials)
    # The first player takes 0, 2, 4 and 6, and has the diagonal 2, 4, 6 with its fourth move.
    assert result.transcript.turns == 7
    assert result.scores is not None
    assert result.scores.reward == pytest.approx((4 * 1 + 3 * -1) / 7)
    assert result.scores.is_success is True


def test_a_match_that_is_cut_is_worth_nothing_to_anybody(tmp_path: Path) -> None:
    with model_server(first_free) as url:
        (score,) = played(TIC_TAC_TOE, ["-n", "1", "--turns-max", "3"], url, tmp_path / "out")
    assert (score["reward"], score["status"], score["turns"]) == (0.0, "truncated", 3)


async def test_matches_side_by_side_are_those_that_run_alone_and_leave_chance_alone() -> None:
    tasks = open_tasks(GUESSING)
    drawn = tasks.draw(TaskDraw(size=6))
    with model_server(halves) as url:
        credentials = Credentials(base_url=f"{url}/v1", api_key="k", model="scripted", episode_uuid="")
        rollout = Rollout(tasks.environment, tasks.budgets)
        random.seed(5)
        before = random.getstate()
        together = await asyncio.gather(*(rollout.play(task, credentials) for task in drawn))
        alone = [await rollout.play(task, credentials) for task in drawn]
    assert [each.transcript.turns for each in together] == [each.transcript.turns for each in alone]
    assert len({each.transcript.turns for each in alone}) > 1
    assert random.getstate() == before


async def test_the_dice_of_a_match_go_on_from_step_to_step() -> None:
    match, dice = ArenaMatch(), random.Random(7)
    match._random = random.Random(7)
    assert [await match._in_turn(random.random) for _ in range(3)] == [dice.random() for _ in range(3)]


def test_every_game_without_a_known_flaw_can_be_set_up() -> None:
    games = [name for name in FAMILIES["textarena"].names() if name.name.endswith("-v0")]
    assert len(games) > 80
    for game in games:
        if game.flaw:
            assert _plain(game.name) in FLAWS
        else:
            assert fewest_players(game.name) >= 1
    assert sum(not game.flaw for game in games) > 60


def repeats(text: str, turns: int) -> PlayAgents:
    """Return agents that always say the same, and give up after so many turns."""
    left = iter(range(turns))

    async def ask(role: str, messages: object, tools: object, max_tokens: object) -> ChatAnswer:
        if next(left, None) is None:
            raise NoModelAnswer("it has said enough")
        message = {"role": "assistant", "content": text}
        return ChatAnswer(
            message=message, text=text, tool_calls=(), finish="stop", prompt_tokens=1, completion_tokens=1, call="c"
        )

    return PlayAgents(ask)


@pytest.mark.parametrize("text", ["x", "[0]", "[0 0] [1] [accept]"])
async def test_every_game_without_a_known_flaw_can_be_played(text: str) -> None:
    games = [name.name for name in FAMILIES["textarena"].names() if not name.flaw]
    assert len(games) > 160
    for game in games:
        match = ArenaMatch()
        task = Task(metadata={"game": game, "players": fewest_players(game), "seed": 5})
        with suppress(NoModelAnswer):
            await match.play(task, repeats(text, 60))
        assert all(-1.0 <= value <= 1.0 for value in match._rewards.values()), game


async def test_a_game_that_fails_in_the_middle_of_a_match_is_the_environments_fault() -> None:
    task = Task(metadata={"game": "CharacterConclave-v0", "players": 3, "seed": 5})
    with pytest.raises(EnvironmentLost, match="CharacterConclave-v0 failed in the middle of a match: TypeError"):
        await ArenaMatch().play(task, repeats("x", 60))
    task = Task(metadata={"game": "ThreeCardMonte-v0", "players": 1, "seed": 5})
    with pytest.raises(EnvironmentLost, match="could not convert string to float"):
        await ArenaMatch().play(task, repeats("x", 60))


def test_games_are_drawn_by_seed_and_split() -> None:
    tasks = open_tasks(GUESSING)
    seeds = [
        {task.metadata["seed"] for task in tasks.draw(TaskDraw(size=9, seed=s, split=split))}
        for s in (0, 1)
        for split in TaskSplit
    ]
    assert all(not one & other for at, one in enumerate(seeds) for other in seeds[:at])
    assert ArenaMatch().outcome([]) == []


def test_games_that_there_are_not_or_that_cannot_be_played_are_refused() -> None:
    with pytest.raises(Refused, match="textarena has no game 'Go-v0'"):
        open_tasks("textarena:Go-v0")
    with pytest.raises(Refused, match="Wordle-v0 needs word lists that NLTK downloads"):
        open_tasks("textarena:Wordle-v0")
    with pytest.raises(Refused, match="Countdown-v0 passes wrong arguments to textarena, and fails in the middle"):
        open_tasks("textarena:Countdown-v0")
    with pytest.raises(Refused, match="the option players=0"):
        open_tasks(TIC_TAC_TOE, {"players": "0"})
