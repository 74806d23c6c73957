"""What `bombus up` starts where a tracker's package is installed, and who gets the keys."""

from pathlib import Path

import pytest

from bombus.config.cluster import Cluster
from bombus.host.layout import ONE_ENGINE, Layout, services
from bombus.insight.trackers.adapters import KEY_VARIABLES


def test_one_process_writes_to_trackers_and_it_alone_has_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in KEY_VARIABLES:
        monkeypatch.setenv(name, f"secret of {name}")
    cluster: Cluster = ONE_ENGINE.model_copy(update={"data_dir": str(tmp_path)})
    planned = services(Layout(cluster=cluster), "nats://127.0.0.1:4222")
    (tracking,) = (service for service in planned if service.kind == "track")
    assert tracking.command[-3:] == ("--follow", "--folder", str(tmp_path / "trackers"))
    assert {name: tracking.environment[name] for name in KEY_VARIABLES} == {
        name: f"secret of {name}" for name in KEY_VARIABLES
    }
    for service in planned:
        assert "secret of" not in str(service), "a command line is shown to all users of a machine"
        assert service is tracking or not set(KEY_VARIABLES) & set(service.environment), service.name
