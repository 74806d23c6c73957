"""Replies, what they are worth, and how documents are shown."""

import pytest

from bombus.tasks.search.answers import (
    ActionKind,
    SearchAction,
    action_of,
    information,
    is_match,
    normal,
    worth,
)
from bombus.tasks.search.corpus import SearchDocument

SEARCH = SearchAction(ActionKind.SEARCH, "q")
INVALID = SearchAction(ActionKind.INVALID)
RIGHT = SearchAction(ActionKind.ANSWER, "The Seine.")
WRONG = SearchAction(ActionKind.ANSWER, "Thames")


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("I look it up. <search>capital of France</search>", SearchAction(ActionKind.SEARCH, "capital of France")),
        (
            "<search>a</search><information>made up</information><answer>b</answer>",
            SearchAction(ActionKind.SEARCH, "a"),
        ),
        ("<answer> Paris </answer>", SearchAction(ActionKind.ANSWER, "Paris")),
        ("<answer>Paris", SearchAction(ActionKind.ANSWER, "Paris")),
        ("<search>" + "x" * 600, SearchAction(ActionKind.SEARCH, "x" * 500)),
        ("<search> </search>", INVALID),
        ("<search>a</answer>", SearchAction(ActionKind.SEARCH, "a</answer>")),
        ("Paris", INVALID),
        ("", INVALID),
    ],
)
def test_a_reply_is_its_first_action(reply: str, action: SearchAction) -> None:
    assert action_of(reply) == action


@pytest.mark.parametrize(
    ("actions", "value"),
    [
        ([RIGHT], 1.0),
        ([SEARCH, RIGHT], 1.0),
        ([INVALID, RIGHT], 0.8),
        ([SEARCH, WRONG], 0.2),
        ([INVALID, WRONG], 0.0),
        ([SEARCH, SEARCH], 0.0),
        ([], 0.0),
    ],
)
def test_what_replies_are_worth(actions: list[SearchAction], value: float) -> None:
    assert worth(actions, ["Seine", "River Seine"], 0.2) == value


def test_answers_match_but_for_case_articles_punctuation_and_spaces() -> None:
    assert normal("  The  Chao-Phraya!") == "chao phraya"
    assert is_match("the chao phraya.", ["Chao Phraya"])
    assert not is_match("Chao", ["Chao Phraya"])


def test_documents_are_shown_with_number_and_title() -> None:
    shown = information([SearchDocument("France", "Its capital is Paris."), SearchDocument("Paris", "A city.")])
    assert shown == "<information>Doc 1(Title: France) Its capital is Paris.\nDoc 2(Title: Paris) A city.</information>"
    assert information([]) == "<information>Nothing was found.</information>"
