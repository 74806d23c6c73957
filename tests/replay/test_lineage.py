"""`bombus replay lineage`: from a policy version back to the episodes that it was trained on."""

import json
from collections.abc import Iterator

import msgspec
import pytest

from bombus.cli import main
from bombus.replay.archive import FileSource
from bombus.replay.lineage import as_text, trace
from bombus.replay.source import NotOnLog
from tests.logs.facts import TINY, recorded

Capture = pytest.CaptureFixture[str]
FACTS = recorded(TINY)


@pytest.fixture
def golden() -> Iterator[FileSource]:
    with FileSource.open(TINY) as source:
        yield source


async def test_a_version_leads_back_to_its_batches_episodes_and_clients(golden: FileSource) -> None:
    lineage = await trace(golden, 2, run=1)
    assert (lineage.run, lineage.model, [step.step for step in lineage.steps]) == (1, "tiny", [1, 2])
    for step, batch in zip(lineage.steps, FACTS["batches"]):
        assert {group.task: [member.episode for member in group.episodes] for group in step.groups} == batch["groups"]
        assert len({member.client for member in step.members}) == 2
        assert {member.versions for member in step.members} == {(step.step - 1, step.step - 1)}
        assert step.weights is not None
        assert len(step.weights.sha256) == len(step.checkpoint_digest) == 64
    tree = next(group for group in lineage.steps[0].groups if group.task == "tree")
    assert sorted(member.reward for member in tree.episodes) == [0.25, 0.75]
    assert all(member.calls == 3 and member.tokens > 0 for member in tree.episodes)


async def test_the_newest_run_is_the_default(golden: FileSource) -> None:
    assert (await trace(golden, 1)).run == 2
    assert (await trace(golden, 1, run=1)).run == 1
    assert (await trace(golden, 1)).steps[0].checkpoint_digest == FACTS["engines"]["main"]["checkpoint_digest"]


async def test_a_step_without_a_checkpoint_is_not_called_unfinished(golden: FileSource) -> None:
    def says(**changes: object) -> str:
        changed = msgspec.structs.replace(lineage.steps[-1], checkpoint="", checkpoint_digest="", **changes)
        return "\n".join(as_text(msgspec.structs.replace(lineage, steps=[changed]), episodes=False))

    lineage = await trace(golden, 2, run=1)
    assert "none of this step (trainer.checkpoint_every), made by trainer epoch 1" in says()
    assert "none: the step was not completed in this log" in says(trainer_epoch=0)


async def test_a_missing_step_is_refused_with_the_steps_that_exist(golden: FileSource) -> None:
    with pytest.raises(NotOnLog, match="run 1 of engine main has no batch for step 7 in this log; it has 1 to 2"):
        await trace(golden, 7, run=1)
    with pytest.raises(NotOnLog, match="has no engine other, only main"):
        await trace(golden, 1, engine="other")


def test_the_command_lists_tasks_and_on_request_every_episode(capsys: Capture) -> None:
    def output(*words: str) -> str:
        assert main(["replay", "lineage", "--log", str(TINY), "--run", "1", "2", *words]) == 0
        return capsys.readouterr().out

    short = output()
    assert "policy version 2 of engine main, run 1" in short
    assert "4 episodes of 2 clients" in short
    assert "step 1" in short
    assert "main-1-12" not in short
    assert "main-1-12" in output("--episodes")
    assert [step["step"] for step in json.loads(output("--json"))["steps"]] == [1, 2]


def test_subcommands_of_replay_have_help_and_unknown_ones_are_refused(capsys: Capture) -> None:
    for name in ("timeline", "state", "diff", "episode", "lineage"):
        with pytest.raises(SystemExit) as done:
            main(["replay", name, "--help"])
        assert done.value.code == 0
        assert f"bombus replay {name}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        main(["replay", "rewind"])
    assert refused.value.code == 2
