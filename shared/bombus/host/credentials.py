"""Reads what `bombus init` makes: a file of environment variables for each user, such as `main/gateway.env`."""

from collections.abc import Mapping
from pathlib import Path

from bombus.bus_address import VARIABLE, BusUser
from bombus.errors import Code, Refused
from bombus.machine.hive_keys import ADMIN_VARIABLE, CLIENT_VARIABLE

# The user as which each kind of process logs in. Page and trackers only look.
USERS = {
    "coordinator": BusUser.COORDINATOR,
    "gateway": BusUser.GATEWAY,
    "trainer": BusUser.TRAINER,
    "inference": BusUser.INFERENCE,
    "track": BusUser.OBSERVER,
    "web": BusUser.OBSERVER,
}

# The keys that are in files of their own as well: the variable, the argument for such a file, and its name.
KEY_FILES = ((ADMIN_VARIABLE, "admin_key_file", "admin.key"), (CLIENT_VARIABLE, "client_key_file", "client.key"))


def bus_login(folder: Path, hive: str, kind: str) -> Mapping[str, str]:
    """Return the variable that tells a kind of process, such as `gateway`, the bus and its login there."""
    return {VARIABLE: read_environment(folder, hive, USERS[kind])[VARIABLE]}


def read_environment(folder: Path, hive: str, user: BusUser) -> Mapping[str, str]:
    """Return the variables with the credentials of a user. Raises `Refused` if there are none."""
    path = folder / hive / f"{user}.env"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise Refused(
            Code.BAD_CONFIG, f"the credentials of {user} cannot be read from {path} ({error.strerror}): run bombus init"
        ) from error
    return dict(line.split("=", 1) for line in lines if "=" in line)
