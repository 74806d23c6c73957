"""`bombus init`: makes the credentials of every service of a hive, and a NATS server's configuration.

Each service has a file of environment variables and needs no other. Nobody but the owner can read the folder.
"""

import argparse
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from bombus.bus.accounts import accounts
from bombus.bus.server import MAX_PENDING_BYTES
from bombus.bus_address import VARIABLE, BusUser, check_bus_address, has_login, user_name
from bombus.commands.deployment import bus_address, document
from bombus.commands.init_tls import AUTHORITY, TLS_CONFIG, make_certificate, tls_variables
from bombus.config.flags import name_of
from bombus.config.streams import PAYLOAD_BYTES
from bombus.errors import Code, Refused
from bombus.hive.subjects import check_name
from bombus.host.credentials import KEY_FILES
from bombus.machine.hive_keys import ADMIN_VARIABLE, CLIENT_VARIABLE, GENERATIONS
from bombus.private import private_folder, write_private
from bombus.terminal import complain, say

SERVER_CONFIG, CLUSTER_CONFIG = "nats-server.conf", "cluster.conf"
ROUTE_PORT, ROUTE_USER = 6222, "route"
PAGE = "web"  # which logs in as an observer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to put them; only you will be able to read it")
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="a cluster file, with the hive's name and bus")
    parser.add_argument(
        "--hive", type=name_of("hive"), metavar="NAME", help="the hive's name (default: $BOMBUS_HIVE, or main)"
    )
    parser.add_argument(
        "--nats",
        metavar="URL",
        help="where services reach the NATS server, or a cluster of servers separated by commas, without a login "
        "(default: as before, that of the folder's other hives, or nats://127.0.0.1:4222)",
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="where a server keeps its streams, if this is the first hive in the folder (default: its jetstream)",
    )
    parser.add_argument(
        "--tls",
        nargs="+",
        metavar="NAME",
        help="encrypt everything: make a certificate for these names and addresses, by which the machines of all hives "
        "in the folder are reached (this machine's are added)",
    )
    parser.add_argument(
        "--rotate",
        action="store_true",
        help="make new passwords and keys, of which those before stay valid until the next time, and a new certificate",
    )


def run(arguments: argparse.Namespace) -> int:
    plain, _ = document(arguments.config, (), {})
    hive = arguments.hive or plain.get("hive") or os.environ.get("BOMBUS_HIVE", "main")
    nats = arguments.nats or bus_address(plain.get("nats", ""))
    try:
        if arguments.tls or (arguments.folder / AUTHORITY).exists():
            make_certificate(arguments.folder, arguments.tls or (), renew=arguments.rotate)
        written = make_credentials(arguments.folder, hive, nats, rotate=arguments.rotate, store=arguments.store)
    except OSError as error:
        raise Refused(Code.BAD_CONFIG, f"{error.filename} cannot be written: {error.strerror}") from error
    say(*written)
    config = arguments.folder / SERVER_CONFIG
    for included, what in ((TLS_CONFIG, "TLS"), (CLUSTER_CONFIG, "several servers")):
        if included not in config.read_text():
            complain(f'bombus init: add this line to {config} for {what}: include "{included}"')
    own_name = " --name NAME, another on each," if (arguments.folder / CLUSTER_CONFIG).read_text() else ""
    say(f"start the server with nats-server --config {config}{own_name}; after a change: nats-server --signal reload")
    return 0


class _Kept(msgspec.Struct, omit_defaults=True):
    """What the folder keeps of a hive between two calls. Passwords are by user and generation."""

    nats: str
    passwords: dict[BusUser, dict[int, str]]
    admin_key: str
    client_key: str
    admin_before: str = ""
    client_before: str = ""
    route_password: str = ""  # among the servers of a cluster, the same for all hives

    @property
    def keys(self) -> dict[str, list[str]]:
        """The keys of the hive by their variable: the newest, and the one that it replaces."""
        found = {
            ADMIN_VARIABLE: (self.admin_key, self.admin_before),
            CLIENT_VARIABLE: (self.client_key, self.client_before),
        }
        return {name: [key for key in keys if key] for name, keys in found.items()}


def make_credentials(
    folder: Path, hive: str, nats: str = "", *, rotate: bool = False, store: Path | None = None
) -> list[Path]:
    """Make or renew the credentials of a hive, and return the files. `nats` has no login; "" keeps the address.

    What exists is kept, so a second call changes nothing, unless `rotate` asks for a new password for every user, and
    for new keys. What these replace stays valid, and what was before that does not. Raises `Refused`.
    """
    check_name(hive, "hive")
    own = private_folder(folder / hive)
    known = _read(own / "passwords.json")
    kept = known or _Kept(nats or _address_in(folder), {}, _secret(), _secret())
    kept.nats = nats or kept.nats
    kept.route_password = kept.route_password or _route_password(folder)
    if has_login(kept.nats):
        raise Refused(Code.BAD_CONFIG, "--nats must have no login: bombus init makes one for each service")
    if re.search(r"\s", kept.nats):
        raise Refused(Code.BAD_CONFIG, "--nats must have no spaces")
    check_bus_address(kept.nats)
    if known is not None and rotate:
        kept.admin_key, kept.admin_before = _secret(), kept.admin_key
        kept.client_key, kept.client_before = _secret(), kept.client_key
    for user in BusUser:
        of_user = kept.passwords.setdefault(user, {})
        if rotate or not of_user:
            of_user[max(of_user, default=0) + 1] = _secret()
        for generation in sorted(of_user)[:-GENERATIONS]:
            del of_user[generation]
    write_private(own / "passwords.json", msgspec.json.encode(kept).decode())
    # NATS reads JSON as a part of its configuration. The braces around it would make it a block.
    write_private(own / "accounts.conf", json.dumps(accounts(hive, kept.passwords), indent=1)[1:-1].strip() + "\n")
    written = [own / "accounts.conf", *_write_users(folder, hive, kept), *_write_keys(own, kept)]
    config = folder / SERVER_CONFIG
    if not config.exists():
        write_private(config, _server_config((store or folder / "jetstream").absolute()))
    hives = sorted(path.parent.name for path in folder.glob("*/accounts.conf"))
    write_private(folder / "accounts.conf", "".join(f'include "{name}/accounts.conf"\n' for name in hives))
    if not (folder / TLS_CONFIG).exists():
        write_private(folder / TLS_CONFIG, "")
    write_private(folder / CLUSTER_CONFIG, _cluster_config(folder, kept))
    return [config, *written]


def _write_users(folder: Path, hive: str, kept: _Kept) -> Iterator[Path]:
    """Write a file of variables for each user and for the page, which has keys besides, and yield their paths."""
    is_tls = (folder / AUTHORITY).exists()
    for name, user in [*((str(user), user) for user in BusUser), (PAGE, BusUser.OBSERVER)]:
        generation = max(kept.passwords[user])
        login = f"{user_name(hive, user, generation)}:{kept.passwords[user][generation]}"
        variables = {VARIABLE: _with_login(kept.nats, login, is_tls), **tls_variables(folder)}
        if name in (BusUser.GATEWAY, PAGE):
            variables |= {variable: ",".join(keys) for variable, keys in kept.keys.items()}
        elif user is BusUser.OPERATOR:
            variables |= {variable: keys[0] for variable, keys in kept.keys.items()}
        path = folder / hive / f"{name}.env"
        write_private(path, "".join(f"{variable}={value}\n" for variable, value in variables.items()))
        yield path


def _write_keys(own: Path, kept: _Kept) -> Iterator[Path]:
    """Write the keys of the hive to files that gateways read again when they change, and yield their paths."""
    for variable, _, name in KEY_FILES:
        write_private(own / name, "".join(f"{key}\n" for key in kept.keys[variable]))
        yield own / name


def _read(path: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise Refused(Code.BAD_CONFIG, f"{path} cannot be read: {error}; delete it to make new credentials") from error


def _others(folder: Path) -> Iterator[_Kept]:
    found = (_read(path) for path in sorted(folder.glob("*/passwords.json")))
    return (other for other in found if other is not None)


def _address_in(folder: Path) -> str:
    """Return the address of the bus for a new hive, which is that of the folder's other hives."""
    return next((other.nats for other in _others(folder)), "nats://127.0.0.1:4222")


def _route_password(folder: Path) -> str:
    """Return the password of the folder's servers among themselves, or a new one."""
    return next((other.route_password for other in _others(folder) if other.route_password), "") or _secret()


def _with_login(urls: str, login: str, is_tls: bool) -> str:
    usual = "tls://" if is_tls else "nats://"
    return ",".join(
        re.sub(r"^(nats://|tls://)?", lambda scheme: f"{usual if is_tls else scheme[1] or usual}{login}@", url)
        for url in urls.split(",")
    )


def _secret() -> str:
    return secrets.token_urlsafe(24)


def _cluster_config(folder: Path, kept: _Kept) -> str:
    """Return how the servers find each other, or "" if there is only one."""
    hosts = [urlsplit(url if "//" in url else f"//{url}").hostname for url in kept.nats.split(",")]
    if len(hosts) == 1:
        return ""
    login = f"{ROUTE_USER}:{kept.route_password}"
    routes = ", ".join(f'"nats://{login}@{f"[{host}]" if ":" in str(host) else host}:{ROUTE_PORT}"' for host in hosts)
    encrypted = f'include "{TLS_CONFIG}"' if (folder / AUTHORITY).exists() else ""
    return f"""\
cluster {{
  name: bombus
  port: {ROUTE_PORT}
  authorization {{ user: {ROUTE_USER}, password: "{kept.route_password}" }}
  routes: [{routes}]
  {encrypted}
}}
"""


def _server_config(store: Path) -> str:
    # A relative path would depend on where the server is started, and elsewhere it would find no stream.
    return f"""\
# Written once by bombus init. It may be changed.
port: 4222
max_payload: {PAYLOAD_BYTES}
max_pending: {MAX_PENDING_BYTES}
write_deadline: "10s"
include "{TLS_CONFIG}"
include "{CLUSTER_CONFIG}"
jetstream {{ store_dir: {json.dumps(str(store), ensure_ascii=False)}, sync_interval: "1s" }}
accounts {{ include "accounts.conf" }}
"""
