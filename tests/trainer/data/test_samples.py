"""A batch as samples: a file loses nothing of what is trained, and loading it runs no code."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pandas
import pytest
import torch
from pyarrow import parquet

from bombus.config.documents import parse_job
from bombus.errors import EngineFault, Refused
from bombus.hive.records import Choice, FinishReason
from bombus_trainer.data.batch import (
    EpisodeGroup,
    PreparedBatch,
    PreparedGroup,
    PreparedSequence,
    mini_batches,
    prepare,
)
from bombus_trainer.data.packing import TrainingItem
from bombus_trainer.data.sample_files import write
from bombus_trainer.data.samples import Origin, Sample, Status, samples_of
from bombus_trainer.data.sequences import TokenSequence as Merged
from bombus_trainer.replay.debug_rollouts import allowed_template
from tests.trainer.sample_reading import load_samples, sample_of
from tests.trainer.small_batches import VOCAB, call, episode, tiny_settings

ORIGIN = Origin("main", 1, 3)
SETTINGS = tiny_settings(mini_batch_num=2)


def groups() -> list[EpisodeGroup]:
    """Make groups with turns, a rewritten history, choices, another temperature, call rewards, and no signal."""
    first = call("a1", [1, 2, 3], [10, 11], logprob=-0.1)
    turns = episode("a", 1.0, first, call("a2", [4], [12, 13, 14], parent=first, logprob=-0.3, version=2))
    branches = episode(
        "b", 0.25, call("b1", [1, 2, 3], [20], temperature=0.7), call("b2", [1, 2, 9], [21], [22, 23], logprob=-2.5)
    )
    rewarded = episode("c", 0.5, call("c1", [5, 6], [30, 31]), call_rewards=(0.5,))
    plain = episode("d", 1.5, call("d1", [5, 6], [32]), call_rewards=(1.5,))
    silent = [episode(name, 1.0, call(f"{name}1", [7], [40])) for name in ("e", "f")]
    return [
        EpisodeGroup("t1", (turns, branches)),
        EpisodeGroup("t2", (rewarded, plain)),
        EpisodeGroup("t3", tuple(silent)),
    ]


def samples() -> list[Sample]:
    return samples_of(ORIGIN, groups(), prepare(groups(), SETTINGS, VOCAB))


def rebuilt(found: Sequence[Sample]) -> PreparedBatch:
    """Rebuild the trainer's batch from its samples alone."""
    prepared: list[PreparedGroup] = []
    first_id = 0
    for number in range(max(sample.group_index for sample in found) + 1):
        sequences: list[PreparedSequence] = []
        tokens: dict[str, int] = {}
        for sample in (each for each in found if each.group_index == number):
            ours, start = sample.metadata["bombus"], len(sample.tokens) - sample.response_length

            def whole(values: Sequence[float], before: float, kind: type, start: int = start) -> np.ndarray:
                return np.concatenate([np.full(start, before, kind), np.array(values, kind)])

            merged = Merged(
                episode=ours["episode"],
                tokens_T=np.array(sample.tokens),
                loss_mask_T=whole(sample.loss_mask, 0, np.bool_),
                logprobs_T=whole(sample.rollout_log_probs, 0, np.float32),
                versions_T=whole(ours["versions"], -1, np.int64),
                calls_T=whole([-1] * sample.response_length, -1, np.int64),
                temperatures_T=whole(ours["temperatures"], 1, np.float32),
            )
            sequences.append(PreparedSequence(merged, whole(ours["advantages"], 0, np.float32), first_id))
            first_id += sum(sample.loss_mask)
            tokens[merged.episode] = tokens.get(merged.episode, 0) + sum(sample.loss_mask)
        prepared.append(PreparedGroup(tuple(sequences), tokens))
    return PreparedBatch(tuple(prepared), first_id, 0, 0, ())


def flat(items: list[list[TrainingItem]]) -> list[bytes]:
    """Return every number that the loss is computed from."""
    found = []
    for item in (item for part in items for item in part):
        terms = [getattr(item.terms, name) for name in item.terms.__dataclass_fields__]
        found += [array.tobytes() for array in (item.tokens_T, item.positions_N, *terms)]
    return found


def test_the_trainers_batch_can_be_rebuilt_from_the_file_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path / "b.pt", 3, samples())
    back = load_samples(tmp_path / "b.pt")
    assert back == samples()
    prepared = prepare(groups(), SETTINGS, VOCAB)
    for epoch in (0, 1):
        ours = mini_batches(prepared, SETTINGS, 3, epoch)
        assert flat(mini_batches(rebuilt(back), SETTINGS, 3, epoch)) == flat(ours)
    assert len(flat(ours)) > 0


def test_a_sample_is_a_branch_whose_response_begins_at_its_first_trained_token() -> None:
    (turns, _, choice, other, *_) = samples()
    assert (turns.tokens, turns.response_length) == ([1, 2, 3, 10, 11, 4, 12, 13, 14], 6)
    assert turns.loss_mask == [1, 1, 0, 1, 1, 1]
    assert turns.rollout_log_probs == [float(np.float32(value)) for value in (-0.1, -0.1, 0, -0.3, -0.3, -0.3)]
    assert turns.weight_versions == ["0", "2"]
    assert turns.reward == 1.0
    ours = turns.metadata["bombus"]
    assert (ours["engine"], ours["run"], ours["step"], ours["task"]) == ("main", 1, 3, "t1")
    assert ours["versions"] == [0, 0, -1, 2, 2, 2]
    assert len(ours["advantages"]) == 6
    assert [each.metadata["bombus"]["branch"] for each in (choice, other)] == [1, 2]
    assert (choice.tokens, other.tokens) == ([1, 2, 9, 21], [1, 2, 9, 22, 23])


def test_the_clients_metadata_is_kept_and_its_label_is_the_samples() -> None:
    prepared = prepare(groups(), SETTINGS, VOCAB)
    (first, *rest) = samples_of(ORIGIN, groups(), prepared, client_metadata={"a": {"label": 42, "source": "gsm8k"}})
    assert (first.label, first.metadata["source"]) == ("42", "gsm8k")
    assert {sample.label for sample in rest} == {None}


def test_a_sequence_that_was_cut_off_at_its_length_is_truncated() -> None:
    record = call("x", [1], [2, 3], [4, 5])
    cut: tuple[Choice, ...] = (
        msgspec.structs.replace(record.choices[0], finish=FinishReason.LENGTH),
        record.choices[1],
    )
    group = [EpisodeGroup("t", (episode("x", 1.0, msgspec.structs.replace(record, choices=cut)),))]
    found = samples_of(ORIGIN, group, prepare(group, SETTINGS, VOCAB))
    assert [sample.status for sample in found] == [Status.TRUNCATED, Status.COMPLETED]


def test_a_pt_file_loads_with_weights_only_and_has_the_fields_of_slimes(tmp_path: Path) -> None:
    write(tmp_path / "b.pt", 3, samples())
    raw = torch.load(tmp_path / "b.pt", weights_only=True)
    assert raw["rollout_id"] == 3
    wanted = {"tokens", "prompt", "response", "response_length", "loss_mask", "rollout_log_probs", "reward", "label"}
    assert wanted | {"metadata", "status", "index", "group_index"} <= raw["samples"][0].keys()
    assert raw["samples"][0]["status"] == "completed"


def test_a_parquet_file_has_a_row_for_each_sample(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", 3, samples())
    rows = parquet.read_table(tmp_path / "b.parquet").to_pylist()
    found = [sample_of({**row, "metadata": msgspec.json.decode(row["metadata"])}) for row in rows]
    assert found == samples()


def test_pandas_reads_a_parquet_file(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", 3, samples())
    table = pandas.read_parquet(tmp_path / "b.parquet")
    assert table["reward"].tolist() == [sample.reward for sample in samples()]
    assert [mask.tolist() for mask in table["loss_mask"]] == [sample.loss_mask for sample in samples()]
    assert table["label"].isna().all()


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match=r"written as \.pt or \.parquet"):
        write(tmp_path / "b.csv", 3, [])


@pytest.mark.parametrize(
    ("asked", "rooted", "allowed"),
    [
        ("a/{rollout_id}.pt", False, True),
        ("a/../{rollout_id}.pt", False, True),
        ("../{rollout_id}.pt", False, False),
        ("/{rollout_id}.pt", False, False),
        ("ROOT/a/{rollout_id}.pt", False, False),
        ("ROOT/a/{rollout_id}.pt", True, True),
        ("ROOT/../{rollout_id}.pt", True, False),
        ("a/{rollout_id}.pt", True, True),
        ("linked/{rollout_id}.pt", False, False),
    ],
)
def test_debug_files_lie_below_the_runs_folder_or_where_the_operator_allows(
    tmp_path: Path, asked: str, rooted: bool, allowed: bool
) -> None:
    run, root = tmp_path / "run", tmp_path / "root"
    for folder in (run, root):
        folder.mkdir()
    (run / "linked").symlink_to(tmp_path)
    asked = asked.replace("ROOT", str(root))
    if allowed:
        assert allowed_template(asked, run, root if rooted else None).endswith("{rollout_id}.pt")
    else:
        with pytest.raises(EngineFault, match="below"):
            allowed_template(asked, run, root if rooted else None)


def test_a_job_that_would_write_all_steps_into_one_file_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        parse_job({"bombus": {"trainer": {"save_debug_rollout_data": "debug/all.pt"}}})
    assert refused.value.why == (
        'bombus.trainer.save_debug_rollout_data = "debug/all.pt" is refused: it must be a path like '
        "DIR/rollout_{rollout_id}.pt"
    )
    asked = "debug/rollout_{rollout_id}.pt"
    job = parse_job({"bombus": {"trainer": {"save_debug_rollout_data": asked}}})
    assert job.trainer.save_debug_rollout_data == asked
