"""Replies, what they are worth, and how documents are shown."""

import pytest

from bombus.tasks.search.answers import (
    ActionKind,
    SearchAction,
    action_of,
    information,
    is_match,
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
        ("I need no <search> here. <answer>Paris</answer>", SearchAction(ActionKind.ANSWER, "Paris")),
        ("It goes into <answer> tags later. <search>q</search>", SearchAction(ActionKind.SEARCH, "q")),
        ("Not <answer> yet. <answer>Paris</answer>", SearchAction(ActionKind.ANSWER, "Paris")),
        ("I need no <search> here. <answer>Paris", SearchAction(ActionKind.ANSWER, "Paris")),
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


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("  the chao-phraya! ", "Chao Phraya"),
        ("1000", "1,000"),
        ("10 000", "10,000"),
        ("US", "U.S."),
        ("USA", "U.S.A."),
        ("OBrien", "O'Brien"),
        ("O'Brien", "O’Brien"),
        ("Jean Luc", "Jean-Luc"),
        ("JeanLuc", "Jean-Luc"),
        ("Washington DC", "Washington, D.C."),
        ("ACDC", "AC/DC"),
        ("STRASSE", "Straße"),
        ("viii", "ⅷ"),
        ("A", "a."),
    ],
)
def test_answers_match_but_for_case_articles_punctuation_and_spaces(answer: str, gold: str) -> None:
    assert is_match(answer, ["something else", gold])
    assert is_match(gold, [answer])


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("Chao", "Chao Phraya"), ("U.S.", "U.S.A."), ("the", "A"), ("...", "A"), ("", "x")],
)
def test_other_answers_do_not_match(answer: str, gold: str) -> None:
    assert not is_match(answer, [gold])


def test_documents_are_shown_with_number_and_title() -> None:
    shown = information([SearchDocument("France", "Its capital is Paris."), SearchDocument("Paris", "A city.")])
    assert shown == "<information>Doc 1(Title: France) Its capital is Paris.\nDoc 2(Title: Paris) A city.</information>"
    assert information([]) == "<information>Nothing was found.</information>"
