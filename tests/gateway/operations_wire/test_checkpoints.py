"""Saving and loading in both dialects, and the paths of checkpoints."""

import msgspec
import pytest

from bombus.errors import Refused
from bombus.operations import CheckpointKind, Failed, LoadWeights, SaveWeights
from bombus_gateway.operations_wire.checkpoints import read_load, read_save, read_weights_info
from bombus_gateway.operations_wire.dialects import TrainingDialect
from bombus_gateway.operations_wire.paths import CheckpointPath, path_of_operation, read_path
from bombus_gateway.operations_wire.submission import Submission

TINKER, XORL = TrainingDialect.TINKER, TrainingDialect.XORL
TRAINING, SAMPLER, EXTERNAL = CheckpointKind.TRAINING, CheckpointKind.SAMPLER, CheckpointKind.EXTERNAL


def saved(dialect: TrainingDialect, kind: CheckpointKind, fields: dict[str, object]) -> Submission:
    body = msgspec.json.encode({"model_id": "S:train:0", "seq_id": 3, **fields})
    submission = read_save(dialect, kind, body)
    assert (submission.model, submission.seq) == ("S:train:0", 3)
    return submission


def error(submission: Submission) -> str:
    assert isinstance(submission.operation, Failed)
    return submission.operation.error


@pytest.mark.parametrize(
    ("dialect", "kind", "fields", "operation"),
    [
        (TINKER, TRAINING, {"path": "a"}, SaveWeights(checkpoint=TRAINING, name="a")),
        (TINKER, TRAINING, {}, SaveWeights(checkpoint=TRAINING, name="")),
        (
            TINKER,
            TRAINING,
            {"path": "a", "ttl_seconds": 3600, "overwrite": True},
            SaveWeights(checkpoint=TRAINING, name="a", overwrite=True, ttl_s=3600.0),
        ),
        (TINKER, SAMPLER, {"path": "b", "kind": "snapshot"}, SaveWeights(checkpoint=SAMPLER, name="b")),
        (TINKER, EXTERNAL, {"path": "c"}, SaveWeights(checkpoint=EXTERNAL, name="c")),
        (XORL, TRAINING, {"path": None}, SaveWeights(checkpoint=TRAINING, name="", overwrite=True)),
        (XORL, SAMPLER, {"name": "step-1"}, SaveWeights(checkpoint=SAMPLER, name="step-1", overwrite=True)),
    ],
)
def test_a_model_is_saved_under_a_name(
    dialect: TrainingDialect, kind: CheckpointKind, fields: dict[str, object], operation: SaveWeights
) -> None:
    assert saved(dialect, kind, fields).operation == operation


@pytest.mark.parametrize(("kind", "inflight"), [("snapshot", False), ("inflight", True)])
def test_a_session_of_sampling_may_begin_with_a_checkpoint(kind: str, inflight: bool) -> None:
    submission = saved(TINKER, SAMPLER, {"sampling_session_seq_id": 4, "kind": kind, "user_metadata": {"k": "v"}})
    name = "inflight-4" if inflight else "sample-4"
    assert submission.operation == SaveWeights(checkpoint=SAMPLER, name=name, ttl_s=86_400.0)
    assert (submission.sampling_session, submission.inflight) == ("S:sample:4", inflight)
    assert submission.metadata == {"k": "v"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"path": "../up"}, "'../up' cannot be the name of a checkpoint"),
        ({"path": ".hidden"}, "cannot be the name"),
        ({"path": "x" * 129}, "use 1 to 128 letters"),
        ({"path": "a", "ttl_seconds": 0}, "ttl_seconds is 0.0, but must be above 0"),
        ({"path": "a", "ttl_seconds": -1}, "ttl_seconds is -1.0"),
        ({"path": "a", "ttl_seconds": 1e12}, "at most 315360000; null keeps it forever"),
        ({"path": "a", "age_encryption_recipients": ["age1"]}, "Checkpoints are not encrypted here"),
        ({"path": "a", "save_optimizer": False}, "save_weights_for_sampler saves only weights"),
        ({"path": 5}, "path: Expected `str | null`"),
        ({"path": "a", "kind": 5}, "kind: Expected `str`"),
        ({"path": "a", "user_metadata": {"k": 5}}, "user_metadata must map names to strings"),
        ({"path": "a", "user_metadata": {"k": "v" * (1 << 12)}}, "user_metadata has 4104 bytes"),
    ],
)
def test_what_cannot_be_saved_fails_in_words(fields: dict[str, object], why: str) -> None:
    assert why in error(saved(TINKER, TRAINING, fields))


@pytest.mark.parametrize(
    ("dialect", "fields", "operation"),
    [
        (
            TINKER,
            {"path": "tinker://R:train:1/weights/a", "optimizer": True},
            LoadWeights(checkpoint="R:train:1/training/a", with_optimizer=True),
        ),
        (XORL, {"path": "xorl://m/weights/a", "optimizer": False}, LoadWeights(checkpoint="m/training/a")),
        (
            XORL,
            {"path": "a", "load_optimizer": True},
            LoadWeights(checkpoint="S:train:0/training/a", with_optimizer=True),
        ),
        (XORL, {"path": "sampler_weights/a"}, LoadWeights(checkpoint="S:train:0/sampler/a")),
    ],
)
def test_a_checkpoint_is_loaded_by_its_path(
    dialect: TrainingDialect, fields: dict[str, object], operation: LoadWeights
) -> None:
    body = msgspec.json.encode({"model_id": "S:train:0", "seq_id": 3, **fields})
    assert read_load(dialect, body).operation == operation


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a", CheckpointPath("mine", TRAINING, "a")),
        ("weights/a", CheckpointPath("mine", TRAINING, "a")),
        ("other/a", CheckpointPath("other", TRAINING, "a")),
        ("weights/other/a", CheckpointPath("other", TRAINING, "a")),
        ("sampler_weights/other/a", CheckpointPath("other", SAMPLER, "a")),
        ("other/training/a", CheckpointPath("other", TRAINING, "a")),
        ("other/weights/a", CheckpointPath("other", TRAINING, "a")),
    ],
)
def test_xorls_client_loads_by_a_path_below_the_folder_of_checkpoints(path: str, found: CheckpointPath) -> None:
    operation = read_load(XORL, msgspec.json.encode({"model_id": "mine", "seq_id": 3, "path": path})).operation
    assert isinstance(operation, LoadWeights)
    assert operation.checkpoint == str(found)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../a",
        "s3://b/weights/a",
        "tinker://a/b",
        "tinker://m/other/a",
        "tinker://m/weights/a/b",
        "x//y",
    ],
)
def test_what_is_no_path_of_a_checkpoint_fails_in_words(path: str) -> None:
    body = msgspec.json.encode({"model_id": "S:train:0", "seq_id": 3, "path": path})
    assert "is not the path of a checkpoint" in error(read_load(TINKER, body))


def test_a_path_is_written_in_the_clients_scheme_and_read_again() -> None:
    path = CheckpointPath("S:train:0", SAMPLER, "b")
    assert (path.uri(TINKER), path.uri(XORL)) == (
        "tinker://S:train:0/sampler_weights/b",
        "xorl://S:train:0/sampler_weights/b",
    )
    assert path.id == "sampler_weights/b"
    assert read_path(path.uri(XORL)) == read_path(path.uri(TINKER)) == path_of_operation(str(path)) == path


def test_a_weights_info_names_a_checkpoint() -> None:
    assert read_weights_info(b'{"tinker_path": "tinker://R/weights/a"}') == CheckpointPath("R", TRAINING, "a")
    assert read_weights_info(b'{"xorl_path": "xorl://m/sampler_weights/a"}') == CheckpointPath("m", SAMPLER, "a")
    with pytest.raises(Refused, match="'' is not the path of a checkpoint"):
        read_weights_info(b"{}")
