"""What `bombus up` checks of its folder before it starts anything."""

from pathlib import Path

import pytest

from bombus.errors import Refused
from bombus.host.supervisor import hold_folder


def test_a_second_hive_in_one_folder_is_told_where_the_first_one_is(tmp_path: Path) -> None:
    with hold_folder(tmp_path / "hive") as held:
        held.write("http://127.0.0.1:10086\n")
        held.flush()
        with pytest.raises(Refused) as refused, hold_folder(tmp_path / "hive"):
            pass
    assert (
        "a hive is already running here, at http://127.0.0.1:10086: use it, or start another one" in refused.value.why
    )
    with hold_folder(tmp_path / "hive") as held:
        assert not (tmp_path / "hive" / "up").read_text(), "what ran here before is no hive that runs"


def test_a_folder_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(Refused, match="cannot be used: File exists; name another one with --data-dir"),
        hold_folder(tmp_path / "file" / "hive"),
    ):
        pass
