"""Who may do what on a bus whose server was configured by `bombus init`: a NATS account for each kind of service.

The hive's own account has the streams. Its users are the coordinator and the operator. Every other service has an
account that reaches nothing of that account but what is imported below, from the table in `grants`.

They are accounts, and not permissions of users within one account, so that the answers to a service's requests are
confined as well: they reach nothing outside its account.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from bombus.bus.requests import JETSTREAM_API
from bombus.bus.streams import (
    blob_stream,
    lease_stream,
    secret_stream,
    stream_configs,
)
from bombus.bus_address import BusUser, user_name
from bombus.config.streams import AS_THEY_ARE
from bombus.hive import inbox
from bombus.hive.events import kind_of
from bombus.hive.subjects import REPLICA_KEY, SIGNING_SECRET, Subjects

# Where services find JetStream's API. In every account, the server answers `$JS.API` itself, if only to refuse.
IMPORTED_API = "BOMBUS.API"
ANSWER_S = 10  # after this silence, the server no longer passes on answers to a request; pulls have heartbeats
COPY_S = 3600  # the same for a full copy of the weights, which a trainer first writes
ENTRIES = "environments"  # the key-value entries of environment servers


SERVICES = tuple(user for user in BusUser if user not in (BusUser.OPERATOR, BusUser.COORDINATOR))
# These recognize gateways by a key. They cannot read the secret that it is derived from, with which gateways sign.
RECOGNIZING = (BusUser.TRAINER, BusUser.INFERENCE)

# The messages that each service may put into the inbox. All others are the coordinator's own.
COMMANDS: tuple[type[inbox.Message], ...] = get_args(inbox.AnyCommand)
SENDS: Mapping[BusUser, tuple[type[inbox.Message], ...]] = {
    BusUser.GATEWAY: (
        *COMMANDS,
        inbox.AnswersBroke,
        inbox.BatchSent,
        inbox.CallRecorded,
        inbox.ModelReadFact,
        inbox.Touch,
    ),
    BusUser.TRAINER: (
        inbox.CheckpointWritten,
        inbox.EngineBroke,
        inbox.GiveUpGroups,
        inbox.ModelAway,
        inbox.OperationBegins,
        inbox.OperationDone,
        inbox.RebuildsModel,
        inbox.StageReached,
        inbox.StepBroke,
        inbox.StepDone,
        inbox.TrainerAlive,
        inbox.TrainerHangs,
        inbox.TrainerOpens,
        inbox.TrainerRests,
        inbox.TrainerServes,
        inbox.WeightsSaved,
    ),
    BusUser.INFERENCE: (
        inbox.LoadBroke,
        inbox.ReplicaAlive,
        inbox.ReplicaLeaves,
        inbox.StageReached,
        inbox.WeightsLoadedFact,
    ),
}


class Grants(msgspec.Struct, frozen=True):
    """What a service may do: read and purge streams, publish to subjects, and ask trainers at subjects."""

    reads: tuple[str, ...] = ()
    purges: tuple[str, ...] = ()
    publishes: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()


def grants(subjects: Subjects, user: BusUser) -> Grants:
    """Return what a service other than the coordinator may do. Every user may also see how full the streams are."""
    names = subjects
    blobs, secrets = blob_stream(subjects), secret_stream(subjects)
    sends = tuple(subjects.inbox(kind_of(kind)) for kind in SENDS.get(user, ()))
    signing, for_replicas = (f"$KV.{subjects.secrets_bucket}.{name}" for name in (SIGNING_SECRET, REPLICA_KEY))
    kept = (names.calls_stream, names.ops_stream, names.trajectories_stream)
    trainers = trainer_subjects(subjects)
    match user:
        case BusUser.GATEWAY:
            bodies = (names.all_calls, names.all_ops, names.all_trajectories)
            return Grants((names.events_stream, *kept, blobs, secrets), (), (*sends, *bodies, signing, for_replicas))
        case BusUser.TRAINER:
            objects = f"$O.{subjects.blobs_bucket}.>"
            own = (*sends, names.all_ops, objects)
            return Grants((names.events_stream, *kept, blobs), (blobs,), own)
        case BusUser.INFERENCE:
            return Grants((names.events_stream, blobs), (), sends, trainers[1:])
        case BusUser.ENVIRONMENT:
            return Grants((), (), (f"$KV.{subjects.leases_bucket}.{ENTRIES}.*",))
        case BusUser.OBSERVER:
            log = (names.events_stream, names.inbox_stream, *kept, blobs, lease_stream(subjects))
            return Grants(log, (), (), trainers[:1])
        case BusUser.OPERATOR | BusUser.COORDINATOR:
            raise ValueError(f"{user} has the hive's own account")


def trainer_subjects(subjects: Subjects) -> tuple[str, str]:
    """Return the subjects at which trainers answer: for what they are doing, and for full copies of the weights."""
    return f"bombus.{subjects.hive}.trainer.>", f"bombus.{subjects.hive}.full-copies.>"


def api_prefix(user: BusUser | None) -> str:
    """Return the subject below which a user finds JetStream's API."""
    return IMPORTED_API if user in SERVICES else JETSTREAM_API


def answer_subjects(hive: str, user: str) -> str:
    """Return the subject to which all answers to a user's requests are sent."""
    return f"_INBOX.{hive}.{user}"


def accounts(hive: str, passwords: Mapping[BusUser, Mapping[int, str]]) -> dict[str, Any]:
    """Return the accounts of a hive for the configuration of a NATS server. `passwords` are by user and generation."""
    subjects = Subjects(hive)
    exported: dict[str, list[str]] = {}  # the accounts that import each service of the hive's account
    found: dict[str, Any] = {}
    for user in SERVICES:
        account = f"{hive}.{user}"
        imports = [_import(hive, subject) for subject in _services(subjects, user)]
        for subject in _services(subjects, user):
            exported.setdefault(subject, []).append(account)
        imports += [_import(f"{hive}.{BusUser.TRAINER}", subject) for subject in grants(subjects, user).asks]
        imports += [{"stream": {"account": hive, "subject": subject}} for subject in _heard(subjects, user)]
        found[account] = {"users": _logins(hive, user, passwords), "imports": imports}
    asked = {subject: [hive] for subject in trainer_subjects(subjects)}
    for user in SERVICES:
        for subject in grants(subjects, user).asks:
            asked[subject].append(f"{hive}.{user}")
    found[f"{hive}.{BusUser.TRAINER}"]["exports"] = [
        {"service": subject, "accounts": who, "response_threshold": f"{COPY_S}s"} for subject, who in asked.items()
    ]
    heard: dict[str, list[str]] = {}
    for user in SERVICES:
        for subject in _heard(subjects, user):
            heard.setdefault(subject, []).append(f"{hive}.{user}")
    found[hive] = {
        "jetstream": "enabled",
        "users": [
            *_logins(hive, BusUser.OPERATOR, passwords),
            *(
                {**login, "permissions": _coordinator(subjects)}
                for login in _logins(hive, BusUser.COORDINATOR, passwords)
            ),
        ],
        "exports": [
            *(_export(subject, who) for subject, who in exported.items()),
            *({"stream": subject, "accounts": who} for subject, who in heard.items()),
        ],
        "imports": [_import(f"{hive}.{BusUser.TRAINER}", subject) for subject in asked],
    }
    return found


def _logins(hive: str, user: BusUser, passwords: Mapping[BusUser, Mapping[int, str]]) -> list[dict[str, Any]]:
    """Return the logins of a user, one for each of its passwords that is valid."""
    return [
        {"user": user_name(hive, user, generation), "password": password}
        for generation, password in passwords[user].items()
    ]


def _services(subjects: Subjects, user: BusUser) -> Iterator[str]:
    """Yield the subjects of the hive's account at which a service may make requests."""
    granted = grants(subjects, user)
    yield from granted.publishes
    for stream in _streams(subjects):
        yield f"{JETSTREAM_API}.STREAM.INFO.{stream}"
    yield from _reading(granted.reads)
    if user in RECOGNIZING:
        yield f"{JETSTREAM_API}.DIRECT.GET.{secret_stream(subjects)}.$KV.{subjects.secrets_bucket}.{REPLICA_KEY}"
    for stream in granted.purges:
        yield f"{JETSTREAM_API}.STREAM.PURGE.{stream}"


def _reading(streams: Iterable[str]) -> Iterator[str]:
    for stream in streams:
        yield f"{JETSTREAM_API}.STREAM.MSG.GET.{stream}"
        yield f"{JETSTREAM_API}.DIRECT.GET.{stream}"
        for call in ("CREATE", "MSG.NEXT", "DELETE"):
            yield f"{JETSTREAM_API}.CONSUMER.{call}.{stream}.>"


def _heard(subjects: Subjects, user: BusUser) -> tuple[str, ...]:
    """Return what the coordinator sends to a service without being asked over NATS: its answers to commands, and why
    it decides nothing."""
    return (f"{answer_subjects(subjects.hive, user)}.>", subjects.undecided)


def _coordinator(subjects: Subjects) -> dict[str, Any]:
    streams = _streams(subjects)
    changes = ("CREATE", "UPDATE", "INFO", "PURGE")
    buckets = (subjects.leases_bucket, subjects.secrets_bucket)
    publish = [
        f"bombus.{subjects.hive}.>",
        f"_INBOX.{subjects.hive}.>",
        f"$O.{subjects.blobs_bucket}.>",
        *(f"$KV.{bucket}.>" for bucket in buckets),
        *(f"{JETSTREAM_API}.STREAM.{change}.{stream}" for change in changes for stream in streams),
        *_reading(streams),
    ]
    return {"publish": publish, "subscribe": list(_heard(subjects, BusUser.COORDINATOR))}


def _streams(subjects: Subjects) -> Sequence[str]:
    return [config["name"] for config in stream_configs(subjects, AS_THEY_ARE)]


def _export(subject: str, who: Sequence[str]) -> dict[str, Any]:
    several = ".MSG.NEXT." in subject or ".DIRECT.GET." in subject  # one request, many answers
    kind = {"response_type": "stream"} if several else {}
    return {"service": subject, "accounts": who, "response_threshold": f"{ANSWER_S}s", **kind}


def _import(account: str, subject: str) -> dict[str, Any]:
    to = subject.replace(JETSTREAM_API, IMPORTED_API, 1)
    return {"service": {"account": account, "subject": subject}, **({"to": to} if to != subject else {})}
