"""Rollouts as files, and the rollout groups that are pushed of them."""

import os
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bombus.bus import Bus
from bombus.errors import BombusError, Refused
from bombus.slime.pushing import groups_of, push_rollouts, rollout_group
from bombus.slime.saved import load_rollout, rollout_file, save_rollout
from bombus.slime.settings import SlimeOptions
from bombus.slime.types import SlimeSample
from tests.trainer.test_runs_of_groups import GroupStage, group_stage

ARGS = Namespace(reward_key=None, rollout_temperature=0.5)
ABORTED = SlimeSample.Status.ABORTED


class RunsCode:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("echo this was run",)


def sample_of(reward: float, group: int | None = 0) -> SlimeSample:
    return SlimeSample(
        group_index=group,
        tokens=[1, 2, 3, 4],
        response_length=3,
        loss_mask=[1, 0, 1],
        rollout_log_probs=[-0.5, 0.0, -0.25],
        reward=reward,
        status=SlimeSample.Status.COMPLETED,
    )


@pytest.fixture
async def scored(bus: Bus, tmp_path: Path) -> AsyncIterator[GroupStage]:
    async with group_stage(bus, tmp_path) as scored:
        yield scored


@pytest.mark.parametrize("ending", ["pt", "jsonl"])
def test_a_rollout_is_read_back_as_it_was(ending: str, tmp_path: Path) -> None:
    path = rollout_file(str(tmp_path / "deep/{rollout_id}") + f".{ending}", 7)
    samples = [sample_of(1.0), sample_of(0.0, 1)]
    save_rollout(path, 7, samples)
    assert path.name == f"7.{ending}"
    assert load_rollout(path) == samples or ending == "jsonl"
    assert [sample.tokens for sample in load_rollout(path)] == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize("ending", ["pt", "jsonl"])
def test_what_no_file_can_hold_is_left_out_and_named(ending: str, tmp_path: Path) -> None:
    sample = sample_of(1.0)
    itself: list[object] = []
    itself += [itself, itself]
    sample.metadata = {"agent": object(), "seen": [1, {"x": object()}], "huge": 1 << 64, "itself": itself}
    sample.metadata["many"] = [1, 1 << 64]
    sample.metadata["by_place"] = {(1, 2): 3, True: 4, 5: 6}
    sample.metadata |= {"array": np.arange(3), "kind": ABORTED, "half": "\ud800", "pair": (1, np.float32(0.5))}
    sample.agent = object()  # type: ignore[attr-defined]
    left_out = save_rollout(tmp_path / f"r.{ending}", 0, [sample, sample])
    assert left_out == [
        "agent (object)",
        "metadata.agent (object)",
        "metadata.by_place.(1, 2) (tuple as a key)",
        "metadata.by_place.True (bool as a key)",
        "metadata.half (str)",
        "metadata.huge (int)",
        "metadata.itself (list)",
        "metadata.many (int)",
        "metadata.many (list)",
        "metadata.seen.x (object)",
    ]
    (again, _) = load_rollout(tmp_path / f"r.{ending}")
    assert list(again.metadata.pop("by_place").values()) == [6]
    assert again.metadata == {"seen": [1, {}], "array": [0, 1, 2], "kind": "aborted", "pair": [1, 0.5]}
    assert (again.tokens, again.reward, hasattr(again, "agent")) == ([1, 2, 3, 4], 1.0, False)


def test_what_is_nested_too_deeply_is_left_out(tmp_path: Path) -> None:
    sample = sample_of(1.0)
    deep: list[Any] = []
    for _ in range(40):
        deep = [deep]
    sample.metadata = {"deep": deep, "flat": [[1]]}
    assert save_rollout(tmp_path / "r.jsonl", 0, [sample]) == ["metadata.deep (list)"]
    assert load_rollout(tmp_path / "r.jsonl")[0].metadata == {"flat": [[1]]}


@pytest.mark.parametrize("ending", ["pt", "jsonl"])
def test_a_file_that_cannot_be_written_is_said_with_what_to_do(ending: str, tmp_path: Path) -> None:
    (tmp_path / "full").write_text("")
    with pytest.raises(BombusError, match="make room, or give another --save-debug-rollout-data"):
        save_rollout(tmp_path / f"full/r.{ending}", 0, [sample_of(1.0)])


@pytest.mark.parametrize("name", ["broken.pt", "broken.jsonl", "absent.jsonl"])
def test_a_damaged_file_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    if name.startswith("broken"):
        (tmp_path / name).write_bytes(b"\x80\x04 not a rollout")
    with pytest.raises(Refused, match=f"{name} cannot be read as a rollout"):
        load_rollout(tmp_path / name)


def test_a_template_with_other_braces_is_refused() -> None:
    with pytest.raises(Refused, match="no other braces"):
        rollout_file("a/{step}.pt", 0)


def test_a_group_is_pushed_with_what_its_samples_say_is_trained() -> None:
    gone = [SlimeSample(group_index=0, status=ABORTED), sample_of(9.0)]
    gone[1].remove_sample = True
    body = rollout_group([sample_of(1.0), sample_of(0.0), *gone], ARGS)
    assert body == {
        "tokens": [[1, 2, 3, 4]] * 2,
        "masks": [[-100, 2, -100, 4]] * 2,
        "scores": [1.0, 0.0],
        "generation_params": {"temperature": 0.5},
        "inference_logprobs": [[1.0, -0.5, 1.0, -0.25]] * 2,
    }
    assert rollout_group(gone, ARGS) is None
    unknown = sample_of(1.0)
    unknown.rollout_log_probs = None
    both = rollout_group([sample_of(0.0), unknown], ARGS)
    assert both is not None
    assert "inference_logprobs" not in both
    broken = sample_of(1.0)
    broken.loss_mask = [1]
    with pytest.raises(Refused, match="does not fit its tokens"):
        rollout_group([broken], ARGS)
    broken = sample_of(1.0)
    broken.rollout_log_probs = [-0.5, -0.25]
    with pytest.raises(Refused, match="has 2 rollout_log_probs for 3 tokens of a response"):
        rollout_group([broken], ARGS)


def test_a_file_of_slimes_with_numbers_of_numpy_and_counters_of_another_release_is_read(tmp_path: Path) -> None:
    row = sample_of(1.0).to_dict()
    row |= {
        "reward": np.float64(0.5),
        "metadata": {"seen": np.arange(3), "count": np.int64(7), "right": np.bool_(True)},
    }
    row |= {"tokens": torch.tensor(row["tokens"]), "rollout_log_probs": np.array(row["rollout_log_probs"])}
    row |= {"spec_info": {"spec_verify_ct": 2, "spec_draft_ct": 9}}
    torch.save({"rollout_id": 0, "samples": [row]}, tmp_path / "slime.pt")
    (sample,) = load_rollout(tmp_path / "slime.pt")
    assert (sample.metadata["seen"].tolist(), sample.metadata["count"]) == ([0, 1, 2], 7)
    assert sample.spec_info.spec_verify_ct == 2
    body = rollout_group([sample], ARGS)
    assert body is not None
    assert (body["tokens"], body["scores"]) == ([[1, 2, 3, 4]], [0.5])
    assert body["inference_logprobs"] == [[1.0, -0.5, 1.0, -0.25]]


@pytest.mark.parametrize(
    ("held", "named"),
    [(RunsCode(), r"posix\.system"), (np.array([RunsCode()], dtype=object), "ObjectDType"), (ABORTED, "getattr")],
)
def test_what_takes_code_to_read_is_refused_by_its_name(
    held: object, named: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save({"samples": [{"metadata": held}]}, tmp_path / "r.pt")
    with pytest.raises(Refused, match=f"{named}.* would run code: save plain values"):
        load_rollout(tmp_path / "r.pt")
    assert not capfd.readouterr().out


def test_an_empty_line_is_no_sample(tmp_path: Path) -> None:
    save_rollout(tmp_path / "r.jsonl", 0, [sample_of(1.0)])
    (tmp_path / "r.jsonl").write_bytes(b"\n" + (tmp_path / "r.jsonl").read_bytes() + b"\r\n")
    assert len(load_rollout(tmp_path / "r.jsonl")) == 1


def test_samples_of_one_prompt_are_a_group() -> None:
    given = [sample_of(1.0, 3), sample_of(1.0, 4), sample_of(0.0, 3), sample_of(0.0, None)]
    assert [len(group) for group in groups_of(given)] == [2, 1, 1]


async def test_loaded_rollouts_are_trained(scored: GroupStage, tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}.pt")
    for rollout in (0, 1):
        save_rollout(rollout_file(template, rollout), rollout, [sample_of(1.0), sample_of(0.0)])
    said: list[str] = []
    url = str(scored.http.base_url)
    scored.stage.train()
    await scored.begin()
    await scored.version(0)
    assert await push_rollouts(SlimeOptions(server_url=url, load_debug_rollout_data=template), said.append) == 0
    assert said == ["2 groups are in the queue"]
    await scored.version(1)
    done = scored.stage.engine.step_done
    assert done is not None
    assert (done.metrics["episodes"], done.metrics["tokens_trained"]) == (4, 8), "two of three tokens of each response"
    absent = SlimeOptions(server_url=url, load_debug_rollout_data=f"{tmp_path}/x{{rollout_id}}")
    with pytest.raises(Refused, match="there is no rollout to load"):
        await push_rollouts(absent, said.append)
