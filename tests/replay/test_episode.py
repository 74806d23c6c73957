"""`bombus replay episode`: how it ended, and every token with the figures that it was trained with."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from bombus.cli import main
from bombus.config.job import RunConfig
from bombus.errors import LogCorrupted
from bombus.hive import events as ev
from bombus.hive.events import AbortReason, BatchReady, EpisodeType
from bombus.hive.records import CallRecord, CallRef, SamplingParams
from bombus.replay.archive import FileSource
from bombus.replay.episode.html import page
from bombus.replay.episode.story import EpisodeStory, read_story
from bombus.replay.episode.text import text
from bombus.replay.episode.tree import EpisodeTranscript, IdsAsText, Token, Turn, TurnReply, read_transcript
from bombus.replay.export import export
from bombus.replay.source import NotOnLog, state_at
from bombus_gateway.text.token_texts import TextsOfTokens, text_of, token_texts
from bombus_trainer.data.batch import prepare
from bombus_trainer.data.reading import read_batch
from bombus_trainer.settings import TrainerSettings
from tests.logs.facts import TINY

Capture = pytest.CaptureFixture[str]
HOSTILE = "<script>alert(1)</script> & \"quoted\" 'too' \x1b[31m \u202e"


@pytest.fixture
def golden() -> Iterator[FileSource]:
    with FileSource.open(TINY) as source:
        yield source


async def test_a_trained_episode_has_its_tree_and_its_advantage(golden: FileSource) -> None:
    """Rewards 0.25 and 0.75: over their standard deviation (n - 1) of 0.3536 that is 0.7071 either way."""
    transcript = await read_transcript(golden, await read_story(golden, "main-1-5"))
    story = transcript.story
    assert (story.task, story.step, story.version) == ("tree", 1, 0)
    assert story.fate.startswith("trained in step 1")
    assert story.outcome is not None
    sign = 1 if story.outcome.reward == 0.75 else -1
    assert [turn.advantage for turn in transcript.turns] == pytest.approx([sign * 0.70710] * 3, abs=1e-4)
    assert [turn.parent for turn in transcript.turns] == [0, 1, 0], "the rewritten history starts a branch"
    assert transcript.branches() == [(1, 2), (3,)]
    assert [[message["role"] for message in turn.messages] for turn in transcript.turns] == [
        ["user"], ["user"], ["user", "assistant", "user"],
    ]  # fmt: skip
    tokens = [token for turn in transcript.turns for reply in turn.replies for token in reply.tokens]
    assert all(token.trained and token.version == 0 and token.logprob < 0 for token in tokens)
    for turn in transcript.turns:
        (reply,) = turn.replies
        assert reply.message is not None
        sampled = "".join(token.text for token in reply.tokens)
        for special in ("<|im_start|>", "<|im_end|>", "<pad>", "<eos>"):
            sampled = sampled.replace(special, "")
        assert sampled == reply.message["content"]
    assert transcript.turns[1].prompt_tokens == transcript.turns[0].prompt_tokens + len(
        transcript.turns[0].replies[0].tokens
    ) + (transcript.turns[1].prompt_added)


async def test_rewards_for_calls_give_each_call_its_own_advantage(golden: FileSource) -> None:
    """Turn by turn, 0.0, 0.5 and 1.0 against zeros: the first has nothing to compare."""
    stories = [
        await read_transcript(golden, await read_story(golden, episode)) for episode in ("main-1-12", "main-1-13")
    ]
    better = max(stories, key=lambda transcript: transcript.story.outcome.reward if transcript.story.outcome else 0.0)
    assert [turn.advantage for turn in better.turns] == pytest.approx([0.0, 0.7071, 0.7071], abs=1e-4)


async def transcript_under(
    golden: FileSource, episode: str, turn_tokens_max: int = 0, **trainer: str
) -> EpisodeTranscript:
    """Return the transcript that an episode would have, had its run been configured with these settings too."""
    story = await read_story(golden, episode)
    assert story.config is not None
    tree = json.loads(story.config.config)
    tree["trainer"] |= trainer
    if turn_tokens_max:
        tree["rollout"]["max_response_length_in_one_turn"] = turn_tokens_max
    story.config = msgspec.structs.replace(story.config, config=json.dumps(tree))
    return await read_transcript(golden, story)


async def test_an_advantage_that_depends_on_the_whole_batch_is_not_shown(golden: FileSource) -> None:
    transcript = await transcript_under(golden, "main-1-5", adv_estimator="reinforce_plus_plus")
    assert {turn.advantage for turn in transcript.turns} == {None}
    assert (
        "no advantages: reinforce_plus_plus normalizes over the whole batch: see `bombus replay batch`"
        in transcript.notes
    )


async def test_an_episode_that_the_job_masks_is_not_shown_as_trained(golden: FileSource) -> None:
    """One of its calls was cut at the six tokens that its client asked for."""
    for overlong, turn_tokens_max, trained in (("keep", 6, True), ("mask", 6, False), ("mask", 7, True)):
        transcript = await transcript_under(golden, "main-1-5", turn_tokens_max, overlong=overlong)
        assert (
            any(token.trained for turn in transcript.turns for reply in turn.replies for token in reply.tokens)
            == trained
        )
        assert all("cut at the job's limit" in turn.untrained for turn in transcript.turns) != trained


class HeldToForms(FileSource):
    """An archive whose calls all were held to a form by their engine."""

    async def records(self, refs: Sequence[CallRef]) -> list[CallRecord]:
        return [msgspec.structs.replace(each, constrained=("tool_choice",)) for each in await super().records(refs)]


async def test_a_call_that_was_held_to_a_form_is_not_shown_as_trained() -> None:
    with HeldToForms.open(TINY) as source:
        transcript = await read_transcript(source, await read_story(source, "main-1-5"))
    assert all("forced into a format (tool_choice)" in turn.untrained for turn in transcript.turns)
    assert not any(token.trained for turn in transcript.turns for reply in turn.replies for token in reply.tokens)


async def test_masks_versions_and_advantages_are_those_that_the_trainer_uses(golden: FileSource) -> None:
    async for entry in golden.events():
        if not isinstance(entry.event, BatchReady):
            continue
        batch = await read_batch(golden, entry.event)
        job = (await state_at(golden, entry.seq)).engine("main").active
        assert job is not None
        prepared = prepare(batch.groups, TrainerSettings.of_job(RunConfig.from_json(job.config)), vocab_size=1000)
        trained: dict[str, list[tuple[float, ...]]] = {}
        for line in (line for group in prepared.groups for line in group.sequences):
            sequence = line.sequence
            columns = (sequence.tokens_T, sequence.logprobs_T, sequence.versions_T, line.advantages_T)
            rows = zip(*(column[sequence.loss_mask_T].tolist() for column in columns))
            trained.setdefault(sequence.episode, []).extend(rows)
        for episode, rows_of_it in trained.items():
            transcript = await read_transcript(golden, await read_story(golden, episode))
            shown = [
                (token.id, token.logprob, token.version, turn.advantage)
                for turn in transcript.turns
                for reply in turn.replies
                for token in reply.tokens
                if token.trained
            ]
            assert sorted(shown) == [pytest.approx(row) for row in sorted(rows_of_it)]


@pytest.mark.parametrize(
    ("episode", "ending", "untrained"),
    [
        ("main-1-1", "ended with reward 0.5; dropped untrained: no_signal", ""),
        ("main-1-7", "aborted: client (not needed)", ""),
        ("main-1-8", "aborted: infra (the tool's server was away)", ""),
        ("main-1-9", "a success; measured its policy version, and was not trained on", "an evaluation episode"),
        ("main-1-14", "aborted: engine_stopped", ""),
        ("main-2-5", "waits in the pool", ""),
    ],
)
def test_how_an_episode_ended_is_shown_first(episode: str, ending: str, untrained: str, capsys: Capture) -> None:
    assert main(["replay", "episode", "--log", str(TINY), episode]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"episode {episode}: ")
    assert ending in first
    assert any(f"not trained: {untrained}" in line for line in rest) == bool(untrained)


def test_tokens_are_listed_one_by_one_up_to_a_limit(capsys: Capture) -> None:
    def rows(*words: str) -> list[str]:
        assert main(["replay", "episode", "--log", str(TINY), "main-1-5", *words]) == 0
        return capsys.readouterr().out.splitlines()

    assert sum(" 0     1 " in line for line in rows()) == 3
    assert sum("more: --tokens" in line for line in rows("--tokens", "1")) == 3
    assert not any("logprob" in line for line in rows("--tokens", "0"))
    assert main(["replay", "episode", "--log", str(TINY), "main-1-5", "--tokens", "-1"]) == 2


def test_on_request_each_prompt_is_shown_as_the_model_saw_it(capsys: Capture, tmp_path: Path) -> None:
    command = ["replay", "episode", "--log", str(TINY), "main-1-5", "--prompt"]
    assert main([*command, "--tokens", "0"]) == 0
    calls = [part.splitlines() for part in capsys.readouterr().out.split("\ncall ")[1:]]
    opening = ["⟦<|im_start|>⟧user↵", "b=⟦<|im_end|>⟧↵", "⟦<|im_start|>⟧assistant↵"]
    assert [line[12:] for line in calls[0][3:6]] == opening
    assert [line[:12].strip() for line in calls[1][3:]] == ["prompt", "", "", "", "added", "", "", "", "reply"]
    assert [line[12:] for line in calls[1][3:6]] == opening, "what it extends comes first"
    assert calls[1][6][12:] == "304wi⟦<eos>⟧", "then the reply as it was sampled"
    assert calls[2][3].startswith("  prompt    ⟦<|im_start|>⟧user"), "a rewritten history has nothing before it"
    assert main([*command, "--html", str(tmp_path / "page.html")]) == 2
    assert "--prompt is for the terminal" in capsys.readouterr().err


async def test_a_prompt_whose_beginning_is_lost_says_so(golden: FileSource) -> None:
    story = await read_story(golden, "main-1-5")
    first, *rest = story.calls
    without = msgspec.structs.replace(story, calls={ref: story.calls[ref] for ref in rest})
    extending, branch = (await read_transcript(golden, without, prompts=True)).turns
    assert extending.seen[0] == f"(lost with call {first.id})"
    assert "⟦<|im_start|>⟧user\nand b=" in extending.seen[1]
    assert branch.seen[0] == ""


async def test_a_missing_episode_is_refused_with_the_command_that_lists_those_that_exist(golden: FileSource) -> None:
    with pytest.raises(NotOnLog, match="has no episode main-2-6: `bombus replay episodes` lists"):
        await read_story(golden, "main-2-6")


async def test_calls_that_are_gone_are_named_and_the_rest_is_shown(golden: FileSource, tmp_path: Path) -> None:
    path = tmp_path / "events-only"
    await export(golden, path, with_calls=False)
    with FileSource.open(path) as source:
        transcript = await read_transcript(source, await read_story(source, "main-1-5"))
    assert transcript.turns == ()
    assert len(transcript.lost) == 3
    assert any("tokens are shown as their ids" in note for note in transcript.notes)
    assert transcript.story.outcome is not None
    with pytest.raises(LogCorrupted):
        await golden.records([CallRef(10_000, "none", b"")])


# ---- what is drawn ------------------------------------------------------------------------------------------------


def transcript_of(shown: str, advantage: float | None = 0.5) -> EpisodeTranscript:
    """Return a transcript in which every text is `shown`."""
    story = EpisodeStory(
        id="main-1-1", engine="main", run=1, client=shown, type=EpisodeType.TRAIN, task=shown, version=0, claimed_ns=1,
        aborted=ev.EpisodeAborted(run=1, episodes=("main-1-1",), reason=AbortReason.CLIENT, detail=shown),
    )  # fmt: skip
    function = {"name": shown, "arguments": shown}
    message = {"role": shown, "content": shown, "tool_calls": [{"function": function}]}
    tokens = (Token(1, shown, -0.5, 3, True), Token(2, "b", -3.0, 3, False))
    turn = Turn(
        number=1, call="c1", parent=0, parent_reply=0, role=shown, messages=(message,), prompt=shown, prompt_tokens=3,
        tools=({"function": {"name": shown, "description": shown}},), prompt_added=3, sampling=SamplingParams(),
        variables={"tone": shown}, began_s=0.2,
        replies=(TurnReply(tokens=tokens, finish="stop", message=message),), seconds=0.1, untrained="",
        advantage=advantage, auxiliary_call=shown, overridden=(shown,),
    )  # fmt: skip
    return EpisodeTranscript(story=story, turns=(turn,), lost=(shown,), notes=(shown,))


def with_turns(turns: tuple[Turn, ...]) -> EpisodeTranscript:
    return msgspec.structs.replace(transcript_of("w"), turns=turns)


def test_what_a_call_asked_for_and_did_not_get_is_shown() -> None:
    assert "  overridden or left out: messages.0" in [*text(transcript_of("messages.0"), 10, colour=False)]


def test_an_auxiliary_call_that_is_not_trained_is_no_branch() -> None:
    (turn,) = transcript_of("w").turns
    made = partial(msgspec.structs.replace, turn, auxiliary_call="")
    title = made(number=1, auxiliary_call="title", untrained="an auxiliary call")
    lines = (
        title,
        made(number=2),
        made(number=3, parent=2, auxiliary_call="compaction", untrained="an auxiliary call"),
    )
    assert with_turns(lines).branches() == [(2,)]
    # A call that continues a compaction is a branch with it.
    assert with_turns((*lines, made(number=4, parent=3))).branches() == [(2, 3, 4)]
    trained = made(number=1, auxiliary_call="title")
    assert with_turns((trained, made(number=2))).branches() == [(1,), (2,)]


class Page(HTMLParser):
    """Checks that tags close in order; keeps their names, attributes and the text."""

    VOID = frozenset({"meta", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_a_page_is_self_contained_and_runs_nothing() -> None:
    drawn = Page(page(transcript_of(HOSTILE), "the log"))
    assert {tag for tag, _ in drawn.tags}.isdisjoint({"script", "link", "img", "iframe"})
    for _, attributes in drawn.tags:
        assert not {"src", "onclick", "onload"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
    assert HOSTILE[:25] in drawn.words
    assert "\x1b" not in drawn.words
    assert "\u202e" not in drawn.words
    assert 'template variables {"tone": ' in drawn.words


def test_a_token_on_the_page_has_its_figures_in_its_title() -> None:
    drawn = Page(page(transcript_of("a"), "the log"))
    titles = [attributes["title"] for tag, attributes in drawn.tags if "title" in attributes]
    assert titles == [
        "token 1 · logprob -0.5000 (p 0.607) · version 3 · advantage +0.5000",
        "token 2 · logprob -3.0000 (p 0.050) · version 3 · not trained",
    ]
    kinds = [attributes.get("class") for tag, attributes in drawn.tags if "title" in attributes]
    assert kinds == ["t up", "t m"]


def test_the_command_writes_the_page(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "episode.html"
    assert main(["replay", "episode", "--log", str(TINY), "main-1-5", "--html", str(path)]) == 0
    drawn = Page(path.read_text())
    assert "branch 2" in drawn.words
    assert f"episode main-1-5 · {TINY}" in drawn.words
    assert sum(attributes.get("class") == "tokens" for _, attributes in drawn.tags) == 3


def test_a_terminal_gets_colours_and_a_file_gets_none() -> None:
    plain = "\n".join(text(transcript_of("a"), 10, colour=False))
    assert "\x1b" not in plain
    assert '\n  variables {"tone": "a"}\n' in plain
    painted = "\n".join(text(transcript_of("a"), 10, colour=True))
    assert "\x1b[2m" in painted, "what is not trained is dim"
    assert "\x1b[31m" not in "\n".join(text(transcript_of(HOSTILE), 10, colour=False))


def test_bytes_that_are_not_a_whole_character_are_spelled_out() -> None:
    pieces, specials = [b"", b"a", b"\xe2\x82", "€".encode()], {0: "<pad>"}
    texts = [text_of(token, pieces, specials) for token in (0, 1, 2, 3, 4)]
    assert texts == ["<pad>", "a", "\\xe2\\x82", "€", "<4>"]
    assert IdsAsText()(7) == "<7>"
    assert IdsAsText().marked_up([7, 8]) == "<7><8>"


def small_tokenizer() -> TextsOfTokens:
    """Return the texts of tokens 0 to 2, three bytes of one character; 3 to 6, `<|x>`; and 7, the special `<|x|>`."""
    pieces = ("<0xE2>", "<0x82>", "<0xAC>", "<", "|", "x", ">")
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    described = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "added_tokens": [
            {
                "id": 7, "content": "<|x|>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False,
            }
        ],
    }  # fmt: skip
    return token_texts({"tokenizer.json": json.dumps(described).encode()})


def test_a_special_token_is_marked_and_the_same_characters_in_a_message_are_not() -> None:
    assert small_tokenizer().marked_up([3, 4, 5, 4, 6, 7, 99]) == "<|x|>⟦<|x|>⟧⟦99⟧"


def test_a_character_of_several_tokens_is_whole_in_a_prompt() -> None:
    texts = small_tokenizer()
    assert texts.marked_up([0, 1, 2, 7]) == "€⟦<|x|>⟧"
    assert texts.marked_up([0, 1]) == "\\xe2\\x82"
