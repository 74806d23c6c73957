"""Whole episodes of `search`, by `bombus run`, and what the family takes."""

import json
import re
from pathlib import Path

import pytest

from bombus.cli import main
from bombus.errors import Refused
from bombus.tasks.kinds import TaskDraw, TaskSplit
from bombus.tasks.registry import open_tasks
from bombus.tasks.search.answers import HINT
from bombus.tasks.search.family import SearchOptions
from tests.tasks.model_server import Conversation, model_server

PAGE = (Path(__file__).parents[3] / "docs/tasks.md").read_text()
DOCUMENTS = [{"title": "Bees", "text": "The queen is Ada."}, {"title": "Wasps", "text": "The queen is Eve."}]
QUESTIONS = [{"question": f"Who is queen of the bees, {number}?", "answers": ["Ada"]} for number in range(8)]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The command line of a run over a small index of its own."""
    for name, lines in (("documents", DOCUMENTS), ("questions", QUESTIONS)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [f"documents={tmp_path}/documents", f"questions={tmp_path}/questions"]
    return ["run", "--task", "search", "--set", files[0], "--set", files[1], "--out", str(tmp_path / "out.jsonl")]


def reads(messages: Conversation) -> str:
    """A model that searches, and answers with the queen of the first document."""
    if len(messages) == 1:
        return "<search>queen of the bees</search>"
    found = re.search(r"Doc 1\(Title: Bees\) The queen is (\w+)", messages[-1]["content"])
    return f"<answer>{found[1]}</answer>" if found else "?"


def records(tmp_path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_a_model_that_searches_and_reads_is_right(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with model_server(reads) as url:
        assert main([*words, "--engine", url, "-n", "6", "--at-once", "1"]) == 0
    scores = records(tmp_path)
    assert [(score["reward"], score["is_success"], score["turns"]) for score in scores] == [(1.0, True, 2)] * 6
    assert "search: searches 6, cache_hit_rate 0.833, batches 1" in capsys.readouterr().out


def test_a_reply_that_is_no_action_gets_a_hint_and_costs_a_turn(words: list[str], tmp_path: Path) -> None:
    seen = []

    def mumbles(messages: Conversation) -> str:
        seen.append(messages[-1]["content"])
        return "Hm." if len(messages) == 1 else "<answer>Ada</answer>"

    with model_server(mumbles) as url:
        assert main([*words, "--engine", url, "-n", "1"]) == 0
    (score,) = records(tmp_path)
    assert (score["reward"], score["is_success"], score["metrics"]["invalid_actions"]) == (0.8, True, 1.0)  # type: ignore[index]
    assert seen[1] == HINT


def test_an_episode_ends_after_the_turns_that_the_command_line_allows(words: list[str], tmp_path: Path) -> None:
    with model_server(reads) as url:
        assert main([*words, "--engine", url, "-n", "1", "--turns-max", "1"]) == 0
    (score,) = records(tmp_path)
    assert (score["turns"], str(score["status"]), score["reward"]) == (1, "truncated", 0.0)


def test_a_search_after_which_there_is_no_reply_is_not_made(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with model_server(lambda messages: f"<search>bees {len(messages)}</search>") as url:
        assert main([*words, "--engine", url, "-n", "1"]) == 0
    assert "search: searches 1, cache_hit_rate 0, batches 1" in capsys.readouterr().out


def test_an_option_is_for_the_tasks_that_have_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [*words, "--task", "reasoning_gym:leg_counting", "-n", "2", "--set", "max_turns=3"]
    with model_server(lambda messages: "<search>bees</search>") as url:
        assert main([*both, "--engine", url]) == 0
        assert [score["turns"] for score in records(tmp_path)] == [3, 3, 1, 1]
        (tmp_path / "out.jsonl").unlink()
        assert main([*both, "--engine", url, "--set", "colour=red"]) == 2
    assert "search has no option 'colour': it takes max_turns, topk" in capsys.readouterr().err


def test_a_run_says_when_there_are_fewer_tasks_than_were_asked_for(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with model_server(lambda messages: "<answer>Ada</answer>") as url:
        assert main([*words, "--engine", url, "-n", "7"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "search: 6 tasks will be played: there are no more"


def test_a_wrong_answer_in_the_right_form_is_worth_02_and_is_no_success(words: list[str], tmp_path: Path) -> None:
    with model_server(lambda messages: "<answer>Eve</answer>") as url:
        assert main([*words, "--engine", url, "-n", "1"]) == 0
    (score,) = records(tmp_path)
    assert (score["reward"], score["is_success"]) == (0.2, False)


@pytest.mark.parametrize(("topk", "shown"), [("1", ["1"]), ("2", ["1", "2"])])
def test_a_search_shows_as_many_documents_as_are_asked_for(words: list[str], topk: str, shown: list[str]) -> None:
    seen = []

    def looks(messages: Conversation) -> str:
        seen.append(re.findall(r"Doc (\d+)\(", messages[-1]["content"]))
        return "<search>queen</search>" if len(messages) == 1 else "<answer>Ada</answer>"

    with model_server(looks) as url:
        assert main([*words, "--engine", url, "-n", "1", "--set", f"topk={topk}"]) == 0
    assert seen == [[], shown]


def test_who_only_searches_until_the_turns_are_over_gets_nothing(words: list[str], tmp_path: Path) -> None:
    with model_server(lambda messages: "<search>bees</search>") as url:
        assert main([*words, "--engine", url, "-n", "1", "--set", "max_turns=3"]) == 0
    (score,) = records(tmp_path)
    assert (score["reward"], score["turns"], score["metrics"]["searches"]) == (0.0, 3, 3.0)  # type: ignore[index]


def test_no_question_is_in_both_splits() -> None:
    tasks = open_tasks("search")
    train, held_out = ({task.task_id for task in tasks.draw(TaskDraw(size=1000, split=split))} for split in TaskSplit)
    assert not train & held_out
    assert len(train) > 100
    assert len(held_out) > 30
    assert tasks.draw(TaskDraw(size=5, seed=1)) == tasks.draw(TaskDraw(size=5, seed=1))
    assert tasks.draw(TaskDraw(size=5, seed=1)) != tasks.draw(TaskDraw(size=5, seed=2))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"topk": "0"}, "the option topk=0 of search is not allowed"),
        ({"search_backend": "bing"}, "the option search_backend=bing of search is not allowed"),
        ({"k": "3"}, "search has no option 'k': it takes max_turns, topk"),
        ({"documents": "/nowhere"}, "/nowhere cannot be read"),
        (
            {"documents": "d", "search_backend": "google"},
            "documents needs search_backend=local",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(option: dict[str, str], said: str) -> None:
    with pytest.raises(Refused) as refused:
        open_tasks("search", option)
    assert said in refused.value.why


def test_a_file_that_is_not_of_documents_is_told_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "d").write_text('{"title": "a", "text": "b"}\n\n{"title": 1}\n')
    with pytest.raises(Refused, match="d line 3 is not a document: "):
        open_tasks("search", {"documents": str(tmp_path / "d")})


def test_the_defaults_are_search_r1s_and_those_of_the_page() -> None:
    defaults = {name: value for name, value in SearchOptions().model_dump().items() if value is not None}
    assert defaults == {
        "max_turns": 2,
        "topk": 3,
        "search_concurrency": 256,
        "search_backend": "local",
        "format_score": 0.2,
    }
    told = dict(re.findall(r"^\| `(\w+)` \| `?([\w.]+)`? \| ", PAGE, re.MULTILINE))
    assert told == {name: str(value) for name, value in defaults.items()}
