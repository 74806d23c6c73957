"""The limits of streams as flags and as keys of a cluster file: what they take, where they arrive, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from bombus.cli import main
from bombus.config.streams import STREAMS, StreamLimits, byte_count, bytes_reserved, disk_needed
from bombus.errors import Refused
from bombus.host.doctor_streams import check_room
from tests.config.test_cluster import dry_run, read_cluster, refused_up
from tests.config.test_cluster import planned as planned_by
from tests.config.test_cluster import refusal as refusal_of


def tree(streams: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"engines": {"main": {}}, "streams": streams, **more}


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("512MB", 512_000_000), ("4 GiB", 4 << 30), ("1.5GB", 1_500_000_000), ("64KiB", 1 << 16)],
)
def test_a_size_is_a_number_of_bytes_or_has_a_unit(text: str, size: int) -> None:
    assert byte_count(text) == size


def test_limits_of_a_cluster_file_reach_the_coordinators() -> None:
    streams = {"replicas": 3, "events_bytes_max": "2GiB", "calls_bytes_max": 5_000_000_000}
    coordinator = str(planned_by(tree(streams, nats="nats://a,nats://b,nats://c"))[0])
    assert coordinator.endswith("--stream-replicas 3 --events-bytes-max 2147483648 --calls-bytes-max 5000000000")
    assert "bytes-max" not in str(planned_by(tree({}))[0])


def test_flags_win_over_the_file_and_the_file_keeps_what_they_do_not_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(tree({"events_bytes_max": "2GB", "blobs_bytes_max": "3GB"})))
    lines = dry_run(capsys, "--config", str(file), "--events-bytes-max", "8GB", "--inbox-bytes-max", "1GB")
    flags = "--inbox-bytes-max 1000000000 --events-bytes-max 8000000000 --blobs-bytes-max 3000000000"
    assert next(line for line in lines if " coordinator " in line).endswith(flags)


def test_compaction_and_its_archive_are_settings_of_the_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not {"--no-compact", "--archive"} & set(str(planned_by(tree({}))[0]).split()), "on, without an archive"
    assert "--no-compact" in str(planned_by(tree({}, coordinator={"compact": False}))[0])
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(tree({}, coordinator={"archive": "from-the-file", "count": 2})))
    for flags, wanted in (((), "from-the-file"), (("--archive", "/elsewhere"), "/elsewhere")):
        lines = [line for line in dry_run(capsys, "--config", str(file), *flags) if " coordinator " in line]
        assert len(lines) == 2
        assert all(f"--archive {Path(wanted).absolute()}" in line for line in lines)
    assert "--no-compact" in next(line for line in dry_run(capsys, "--no-compact") if " coordinator " in line)
    refused = refused_up(capsys, "--no-compact", "--archive", "/elsewhere")
    assert "archive (--archive) has no effect without `compact`" in refused


@pytest.mark.parametrize(
    ("streams", "why"),
    [
        ({"replicas": 2}, "streams.replicas: it must be 1, 3 or 5"),
        (
            {"events_bytes_max": 10},
            "streams.events_bytes_max = 10 is refused: it must be a size of at least 4KiB, such as",
        ),
        (
            {"calls_bytes_max": "4 gigs"},
            "streams.calls_bytes_max: '4 gigs' cannot be read as a size: give a size of at least 4KiB",
        ),
        ({"event_bytes_max": 10}, "streams.event_bytes_max is unknown; did you mean events_bytes_max?"),
        (
            {"replicas": 3},
            "streams.replicas 3 (--stream-replicas) is refused: bombus starts only a single NATS server; give",
        ),
    ],
)
def test_a_mistake_in_the_file_is_refused_in_one_sentence(streams: dict[str, Any], why: str) -> None:
    assert refusal_of(tree(streams)).startswith(why)


def test_a_mistake_on_the_command_line_names_the_flag(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused_up(capsys, "--events-bytes-max", "10") == (
        "bombus up: --events-bytes-max 10 is refused: it must be a size of at least 4KiB, such as 512MB or 4GiB"
    )
    assert "give the URLs of a cluster as nats (--nats)" in refused_up(capsys, "--stream-replicas", "3")
    elsewhere = refused_up(capsys, "--durability", "power", "--nats", "nats://elsewhere:4222")
    assert "set sync_interval: always in the configuration of that server" in elsewhere
    assert main(["coordinator", "--stream-replicas", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "bombus coordinator: --stream-replicas 2 is refused: it must be 1, 3 or 5"
    with pytest.raises(SystemExit):
        main(["up", "--calls-bytes-max", "much"])
    assert "--calls-bytes-max: 'much' cannot be read as a size: give a size" in capsys.readouterr().err


def test_a_new_hive_needs_room_for_its_streams_and_for_new_work_beside_them() -> None:
    assert bytes_reserved(StreamLimits()) == 10 * (1 << 30) + (256 << 20)
    small = StreamLimits(**{f"{name}_bytes_max": 10_000_000 for name in STREAMS})
    assert disk_needed(small) == 60_000_000 + (256 << 20), "a disk of 300 MB is too small, however small the streams"
    assert disk_needed(StreamLimits()) * 3 // 4 == bytes_reserved(StreamLimits())


def test_a_disk_without_room_is_refused_at_the_start_with_what_it_needs(tmp_path: Path) -> None:
    def started(**more: Any) -> None:
        check_room(
            read_cluster(tree({"calls_bytes_max": "900TB"}, data_dir=str(tmp_path / "data"), **more), tmp_path)[0]
        )

    with pytest.raises(Refused, match=r"is on a disk with .* free, but this hive needs 1200\.\d TB there: lower the"):
        started()
    started(nats="nats://elsewhere:4222")
    (tmp_path / "data" / "nats" / "jetstream").mkdir(parents=True)
    started()  # its streams are there already
