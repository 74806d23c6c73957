"""TextArena's text games: `textarena:<game>`. In a game for several players, the model plays against itself."""

import asyncio
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import lru_cache, partial
from io import StringIO
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from bombus.environments.budgets import RolloutBudgets
from bombus.environments.kinds import EnvironmentLost, MethodFailed, ResetFailed
from bombus.environments.plain.marks import metric, reward, success
from bombus.environments.plain.play import AgentCall, PlayAgents
from bombus.errors import Code, Refused, in_one_line
from bombus.sdk.errors import InfraError
from bombus.sdk.types import Task
from bombus.tasks.kinds import TaskDraw, TaskFamily, TaskName, TasksNotInstalled, options_of

PLAYERS_MAX = 15
RAW = "-raw"  # games without wrappers: each observation contains only what is new, and extends the conversation
MORE_PLAYERS = {"MarketEntryGame-v0": 2, "PublicGoodsGame-v0": 2, "QuantumTicTacToe-v0": 2, "SpiteAndMalice-v0": 2}
INSTRUCTION = "You play a game. Reply with your move in square brackets, as the rules of the game say."

# Reasons why some games of textarena 0.7.4 cannot be played here, where nothing is downloaded.
_WORDS, _KEY, _SYNTAX, _OTHER, _ARGUMENTS = (
    "needs word lists that NLTK downloads",
    "needs an OpenRouter key for its own model",
    "is not valid Python 3.11",
    "needs packages or files that textarena does not include",
    "passes wrong arguments to textarena, and fails in the middle of a match",
)
FLAWS = {
    **dict.fromkeys(
        ("Codenames", "DontSayIt", "Hangman", "LetterAuction", "WordChains", "WordLadder", "WordSearch", "Wordle"),
        _WORDS,
    ),
    **dict.fromkeys(("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions"), _KEY),
    **dict.fromkeys(
        ("Checkers", "Chess", "IteratedStagHunt", "Klondike", "ReverseTicTacToe", "UltimateTexasHoldem"), _SYNTAX
    ),
    **dict.fromkeys(("BabyAiText", "ScorableGames", "Sokoban", "SpellingBee", "UsedCar", "UsedCarNegotiation"), _OTHER),
    **dict.fromkeys(("CharacterConclave", "Countdown", "Cryptarithm", "Slitherlink", "ThreeCardMonte"), _ARGUMENTS),
}

ResultT = TypeVar("ResultT")
_chance = threading.Lock()  # the games share Python's global random generator


class ArenaOptions(BaseModel):
    """The options of `--set`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    players: int | None = Field(
        default=None,
        ge=1,
        le=PLAYERS_MAX,
        description="how many players the model plays (default: the fewest that the game allows)",
    )


class ArenaTasks:
    """Matches of one game."""

    budgets = RolloutBudgets(turns_max=64, tokens_max=16_384, episode_s=1800.0)

    def __init__(self, game: str, players: int | None = None) -> None:
        self.name = f"textarena:{game}"
        self._game = game
        self._players = players or fewest_players(game)

    def draw(self, draw: TaskDraw) -> list[Task]:
        return [
            Task(
                main_query=f"Play {self._game}.",
                task_id=f"{self.name}/{draw.split}/{draw.seed}/{index}",
                env_type=self.name,
                metadata={"game": self._game, "players": self._players, "seed": draw.first_seed + index},
            )
            for index in range(draw.size)
        ]

    def environment(self) -> object:
        return ArenaMatch()

    def figures(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


class ArenaMatch:
    """A match of a text game. Each player has its own role, `player 0` and so on, and each call gets its player's
    reward."""

    def __init__(self) -> None:
        self._random = random.Random()
        self._rewards: dict[int, float] = {}
        self._invalid = 0

    async def play(self, task: Task, agents: PlayAgents) -> None:
        known = task.metadata
        self._rewards, self._invalid = {}, 0
        self._random = random.Random(known["seed"])
        game = await self._in_turn(lambda: _made(known["game"]))
        try:
            await self._in_turn(lambda: game.reset(num_players=known["players"], seed=known["seed"]))
        except Exception as error:  # raised by the game's own code
            raise ResetFailed(f"{known['game']} could not be set up: {in_one_line(error)}") from error
        talks: dict[int, list[dict[str, Any]]] = {}
        over = False
        while not over:
            player, seen = await self._goes_on(known["game"], game.get_observation)
            talk = talks.setdefault(player, [{"role": "system", "content": INSTRUCTION}])
            talk.append({"role": "user", "content": _observation(player, seen)})
            answer = await agents[_role(player)].ask(talk)
            talk.append(answer.message)
            over, _ = await self._goes_on(known["game"], partial(game.step, answer.text))
        self._rewards, about = await self._goes_on(known["game"], lambda: _ended(game))
        if not self._rewards:
            raise MethodFailed(f"{known['game']} has ended the match without a reward for any player")
        self._invalid = sum(bool(each.get("invalid_move")) for each in about.values())

    async def _goes_on(self, name: str, step: Callable[[], ResultT]) -> ResultT:
        """Run a step of the game. Raises `EnvironmentLost` if the game itself fails."""
        try:
            return await self._in_turn(step)
        except Exception as error:  # raised by the game's own code
            raise EnvironmentLost(f"{name} failed in the middle of a match: {in_one_line(error)}") from error

    async def _in_turn(self, step: Callable[[], ResultT]) -> ResultT:
        """Run a step of the game in a thread, with this match's random state in place of the shared one."""

        def done() -> ResultT:
            with _chance, redirect_stdout(StringIO()):
                others = random.getstate()
                random.setstate(self._random.getstate())
                try:
                    return step()
                finally:
                    self._random.setstate(random.getstate())
                    random.setstate(others)

        return await asyncio.to_thread(done)

    @reward(low=-1.0, high=1.0)
    def outcome(self, calls: list[AgentCall]) -> list[float]:
        """Return the reward of each call, which is its player's reward. In an unfinished match, every player gets 0."""
        by_role = {_role(player): value for player, value in self._rewards.items()}
        return [by_role.get(call.role, 0.0) for call in calls]

    @success
    def is_won(self) -> bool:
        """Return whether the first player won."""
        return self._rewards.get(0, 0.0) >= 1.0

    @metric
    def is_finished(self) -> float:
        """Return whether the match was finished."""
        return float(bool(self._rewards))

    @metric
    def invalid_moves(self) -> float:
        """Return how many players lost the match through an illegal move."""
        return float(self._invalid)


def _ended(game: Any) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
    """Return each player's reward, and the game's information about each player."""
    rewards, about = game.close()
    return {player: float(value) for player, value in (rewards or {}).items()}, about or {}


@lru_cache(128)
def fewest_players(game: str) -> int:
    """Return the smallest number of players for a game. Raises `Refused` if the game cannot be played."""
    why = ""
    if FLAWS.get(_plain(game)) == _ARGUMENTS:
        raise Refused(Code.BAD_CONFIG, f"{game} {_ARGUMENTS}")
    with _chance, redirect_stdout(StringIO()):
        others = random.getstate()
        try:
            for players in range(MORE_PLAYERS.get(game, 1), PLAYERS_MAX + 1):
                try:
                    made = _made(game)
                    made.reset(num_players=players, seed=0)
                    made.get_observation()
                except InfraError as error:
                    raise Refused(Code.BAD_CONFIG, str(error)) from error
                except Exception as error:  # raised by the game's own code: it may need more players
                    why = in_one_line(error)
                else:
                    return players
        finally:
            random.setstate(others)
    raise Refused(Code.BAD_CONFIG, f"{game} cannot be set up for up to {PLAYERS_MAX} players: {why}")


def _made(game: str) -> Any:
    """Make a game. Raises `ResetFailed` if that fails for any reason."""
    arena = _textarena()
    try:
        return arena.make(game + RAW)
    except Exception as error:  # the game's own code may need missing files or packages
        flaw = FLAWS.get(_plain(game))
        raise ResetFailed(f"{game} {flaw}" if flaw else f"{game} cannot be made: {in_one_line(error)}") from error


@lru_cache(1)
def _textarena() -> Any:
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # the game prints its attempts to download files
        try:
            import textarena
        except ImportError as error:
            raise TasksNotInstalled(
                f"textarena cannot be imported ({in_one_line(error)}): pip install 'bombus[textarena]'"
            ) from error
    return textarena


def _observation(player: int, seen: str | list[tuple[Any, ...]]) -> str:
    """Return the observation as shown to a player: the new messages, except for the player's own moves."""
    if isinstance(seen, str):
        return seen
    lines = [
        str(message) if sender < 0 else f"[Player {sender}] {message}"
        for sender, message, *_ in seen
        if sender != player
    ]
    return "\n".join(lines).strip() or "It is your turn."


def _role(player: int) -> str:
    return f"player {player}"


def _plain(game: str) -> str:
    return game.partition("-v")[0]


def _names() -> Sequence[TaskName]:
    registered = _textarena().envs.registration.ENV_REGISTRY
    games = sorted(name.removesuffix(RAW) for name in registered if name.endswith(RAW))
    return [TaskName(name=game, flaw=FLAWS.get(_plain(game), "")) for game in games]


def _open(name: str, given: Mapping[str, str]) -> ArenaTasks:
    options = options_of(ArenaOptions, f"textarena:{name}", given)
    if name not in {each.name for each in _names()}:
        raise Refused(Code.BAD_CONFIG, f"textarena has no game {name!r}: `bombus tasks textarena` lists them")
    return ArenaTasks(name, options.players)


FAMILY = TaskFamily(
    name="textarena",
    about="text games for one or several players from TextArena; the model plays against itself",
    open=_open,
    names=_names,
    package="textarena",
    extra="textarena",
    options=frozenset(ArenaOptions.model_fields),
)
