"""The requests of one run: each follows from the seed and its number. Pure."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto

from bombus.machine.http_limits import DEFAULTS
from bombus_gateway.limits import WAIT_S
from tests.fuzz import corpus
from tests.fuzz.values import ODD, Tree, damaged, mutated, to_json, to_msgpack

CALL_S = 90.0  # for an answer to a model call, of which 64 choices may be wanted, or to a claim
ANSWER_S = 30.0  # and to any other request
CLAIM_S = 6.0  # most clients that claim hang up after this time
SLOW_S = 25.0  # beyond the limit of the server
RAW_S = 1.5  # a client that sent what may be no request waits so long
BODY_BYTES = 12 << 20

Route = tuple[str, str]  # the method and the path
Fill = Callable[[bytes], bytes]  # puts what a hive has where `@episode@` and the like stand


class Server(StrEnum):
    GATEWAY = auto()
    REPLICA = auto()


class Kind(StrEnum):
    """What is wrong with a case: what a request says, what arrives on the socket, or when."""

    CONTENT = auto()
    RAW = auto()
    DROPPED = auto()  # the client hangs up
    TOGETHER = auto()  # several requests about one episode at once


@dataclass(frozen=True)
class Request:
    """One request. `raw` spoils its bytes."""

    method: str
    target: str
    headers: tuple[tuple[str, bytes], ...] = ()
    body: bytes = b""
    raw: Callable[[bytes], list[bytes | float]] | None = field(default=None, compare=False)

    def chunks(self, fill: Fill) -> list[bytes | float]:
        """Return what to send, with pauses in seconds in between."""
        body = fill(self.body)[:BODY_BYTES]
        head = [f"{self.method} {self.target} HTTP/1.1".encode("utf-8", "surrogatepass")]
        head += [name.encode() + b": " + fill(value) for name, value in self.headers]
        if body or self.method == "POST":
            head.append(b"content-length: %d" % len(body))
        sent = b"\r\n".join(head) + b"\r\n\r\n" + body
        return [sent] if self.raw is None else self.raw(sent)


@dataclass(frozen=True)
class HttpCase:
    """Requests for one API, each over a connection of its own. The server owes an answer if `is_owed`.

    With `reads` the client hangs up after so many bytes of the answer, otherwise after `within_s`.
    """

    number: int
    api: Server
    kind: Kind
    requests: tuple[Request, ...]
    within_s: float
    is_owed: bool = True
    reads: int | None = None

    @property
    def label(self) -> str:
        first = self.requests[0]
        return f"case {self.number}, {self.kind} at the {self.api}: {first.method} {first.target[:80]!r}"


@dataclass(frozen=True)
class SlowSender:
    """A client that never comes to the end of its request. The server has to close within `limit_s`."""

    api: Server
    chunks: tuple[bytes | float, ...]
    limit_s: float


def slow_sender(seed: int, number: int) -> SlowSender:
    """Return a client that sends a byte a second, every third one of a body, the others of a head."""
    pick = random.Random(f"slow/{seed}/{number}")
    in_body = number % 3 == 2
    start = b"POST /generate HTTP/1.1\r\nhost: @host@\r\nauthorization: Bearer @replica_key@\r\n" + (
        b"content-length: 1000\r\n\r\n" if in_body else b"x-slow: "
    )
    limit_s = SLOW_S + (DEFAULTS.body_s if in_body else DEFAULTS.head_s)
    drip = [part for _ in range(round(limit_s)) for part in (1.0, pick.choice((b"x", b"{", b" ")))]
    return SlowSender(
        pick.choice(list(Server)), (start[: -pick.randrange(1, 8)] if not in_body else start, *drip), limit_s
    )


def http_case(seed: int, number: int, routes: Sequence[Route], avoided: str = "/stop_engine") -> HttpCase:
    """Return a case for the gateway, whose `routes` these are, or for a replica. `avoided` is not called."""
    pick = random.Random(f"http/{seed}/{number}")
    api = pick.choices((Server.GATEWAY, Server.REPLICA), (8, 1))[0]
    kind = pick.choices(list(Kind), (70, 14, 9, 7))[0]
    if api == Server.REPLICA:
        route, request = _replica_request(pick, changes=kind == Kind.CONTENT)
    elif kind == Kind.TOGETHER:
        return HttpCase(number, api, kind, _together(pick), CALL_S)
    else:
        route = pick.choice([each for each in routes if not each[1].endswith(avoided)])
        request = _gateway_request(route, pick, changes=kind == Kind.CONTENT or pick.random() < 0.3)
    is_claim, is_call = "/claim_episode" in route[1], "/v1/" in route[1] or route[1] == "/generate"
    match kind:
        case Kind.RAW:
            return HttpCase(number, api, kind, (_spoiled(request, pick),), RAW_S, is_owed=False)
        case _ if kind == Kind.DROPPED or route[1] == corpus.ENDLESS:
            kind = Kind.DROPPED
            return HttpCase(
                number, api, kind, (request,), pick.uniform(0, 2), is_owed=False, reads=pick.choice((0, 1, 200, 2000))
            )
    if is_claim and pick.random() < 0.9:
        return HttpCase(number, api, kind, (request,), CLAIM_S, is_owed=False)
    within_s = WAIT_S + ANSWER_S if is_claim else CALL_S if is_call else ANSWER_S
    return HttpCase(number, api, Kind.CONTENT, (request,), within_s)


# ---- what a request says -------------------------------------------------------------------------------------------


def _gateway_request(route: Route, pick: random.Random, changes: bool) -> Request:
    method, path = route
    bodies = corpus.BODIES.get(corpus.bare(path))
    body = b""
    if bodies is not None:
        tree = pick.choice(bodies)
        body = _job(pick) if tree == {"yaml_as_string": "@job@"} else _written(tree, bodies, pick, changes)
    headers = _headers(path, pick, changes)
    target = path
    if changes and pick.random() < 0.15:
        method, target = _odd_line(method, path, pick)
    return Request(method, target, headers, body)


def _written(tree: Tree, donors: Sequence[Tree], pick: random.Random, changes: bool) -> bytes:
    if not changes:
        return to_json(tree)
    body = to_json(mutated(tree, pick, donors))
    return damaged(body, pick) if pick.random() < 0.15 else body


def _job(pick: random.Random) -> bytes:
    """Return the body of a route that takes a job: YAML with something wrong, or a changed document in JSON."""
    if pick.random() < 0.5:
        text = to_json(mutated(corpus.JOB, pick, [corpus.JOB])).decode("utf-8", "replace")
    else:
        lines = corpus.YAML.splitlines()
        where, odd = pick.randrange(len(lines)), pick.choice(corpus.ODD_YAML)
        name = lines[where].partition(":")[0]
        lines[where] = pick.choice((f"{name}: {odd}", odd, f"{lines[where]}\n{odd}"))
        text = "\n".join(lines)
    tree = {"yaml_as_string": text}
    return to_json(tree if pick.random() < 0.8 else mutated(tree, pick))


def _headers(path: str, pick: random.Random, changes: bool) -> tuple[tuple[str, bytes], ...]:
    key = pick.choices((b"@key@", b"@eval_key@", b"@other_key@", b"@ended_key@", b"@key@x", b""), (6, 4, 2, 1, 1, 1))[0]
    headers = [("host", b"@host@"), ("connection", b"close"), ("content-type", b"application/json")]
    if "/v1/" in path or path.endswith("tokenize"):
        headers.append(("authorization", b"Bearer " + key))
    if changes and pick.random() < 0.3:
        headers.append(_odd_header(pick))
    return tuple(headers)


def _odd_header(pick: random.Random) -> tuple[str, bytes]:
    texts = [each for each in ODD if isinstance(each, str) and "\n" not in each and len(each) < 10_000]
    odd = pick.choice(texts).encode("utf-8", "surrogatepass").replace(b"\0", b"")
    name = pick.choice((
        "idempotency-key", "traceparent", "x-stainless-retry-count", "x-bombus-role", "authorization", "x-api-key",
        "origin", "accept",
        "content-type", "content-encoding", "accept-encoding", "cookie", "x-forwarded-host", "range",
        "if-none-match", "te",
    ))  # fmt: skip
    known = {"content-encoding": b"gzip", "origin": b"http://[::1", "traceparent": corpus.TRACEPARENT.encode()}
    return name, known[name] if name in known and pick.random() < 0.5 else odd


def _odd_line(method: str, path: str, pick: random.Random) -> Route:
    targets = (
        f"/k/{'x' * 40}{path}", f"/k/{path}", f"{path}/", f"/{path}", f"{path}?client_uuid=%ff%00",
        f"{path}?client_uuid={'x' * 5000}",
        path.upper(), path.replace("e", "%65"), f"/e/other{path}", f"/e/{path}", f"{path}%2f..", f"{path}#x",
        f"{path};x", "*",
        f"http://other.test{path}", "/" + "x" * 30_000, "/%", "/k/", "/e/main", "//", "/..", path + "\u00e9",
        "/k/%ff" + path,
    )  # fmt: skip
    methods = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND")
    return pick.choice(((pick.choice(methods), path), (method, pick.choice(targets))))


def _replica_request(pick: random.Random, changes: bool) -> tuple[Route, Request]:
    route = pick.choices(list(corpus.REPLICA), (8, *[1] * (len(corpus.REPLICA) - 1)))[0]
    tree = corpus.REPLICA[route]
    body = b""
    if tree is not None:
        write = to_msgpack if route[1] == "/generate" else to_json
        body = write(mutated(tree, pick, [tree]) if changes else tree)
        body = damaged(body, pick) if changes and pick.random() < 0.2 else body
    key = [("authorization", b"Bearer @replica_key@")] if pick.random() < 0.95 else []
    return route, Request(*route, (("host", b"@replica@"), ("connection", b"close"), *key), body)


def _together(pick: random.Random) -> tuple[Request, ...]:
    """Return requests about one episode,
    which are sent at once: at most one way for it to end is the one that counts."""
    paths = ("/end_episode", "/end_episodes", "/abort_episode", "/abort_episodes", "/touch_episodes",
    "/can_continue_episode",
             "/replay_latest_llm_call", "/v1/chat/completions")  # fmt: skip
    chosen = [pick.choice(paths) for _ in range(pick.randrange(3, 12))]
    requests = [_gateway_request(("POST", path), pick, changes=False) for path in chosen]
    return tuple(requests)


# ---- what arrives --------------------------------------------------------------------------------------------------

HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(192)
NOT_HTTP = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\x12\x04" + bytes(23), HELLO, b"SSH-2.0-x\r\n", b"\0" * 100,
    b"\r\n" * 500,
    b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"x" * 10_000, b"INFO {}\r\nPING\r\n",
    b"GET  / HTTP/1.1\r\nhost: x\r\n\r\n", b"GET / HTTP/1.1\nhost: x\n\n", b"GET /\xff HTTP/1.1\r\n\r\n",
    b"*1\r\n$4\r\nPING\r\n",
)  # fmt: skip
ODD_HEADS: Mapping[bytes, tuple[bytes, ...]] = {
    b"content-length: ": (b"-1", b"abc", b"+5", b"0x10", b"1e3", b" ", b"9" * 30, b"5\r\ncontent-length: 6", b"5, 5",
    b"\xb2"),
    b"host: ": (b"", b"a\r\nhost: b", b"[", b"a" * 5000, b"x:99999", b"\xff", b"@", b"evil.test", b"127.0.0.1:1:2",
    b"a b"),
    b"connection: ": (b"keep-alive", b"upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x",
    b"upgrade\r\nupgrade: h2c", b"close" * 50),
    b"content-type: ": (b"x" * 70_000, b"a\r\n" + b"x-h: y\r\n" * 2000 + b"z: 1", b"a\r\nno colon", b"a\r\n folded",
    b"a\0b", b"a\rb"),
}  # fmt: skip
CHUNKED = (
    b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"-5\r\nhello\r\n", b"ffffffffffffffff\r\nx", b"fffffffffffffffff\r\nx",
    b"5\r\nhelloworld\r\n0\r\n\r\n",
    b"0\r\nx: y\r\n\r\n", b"5;" + b"x" * 70_000, b"1\r\n{\r\n" * 2000, b"0\r\n" + b"t: " + b"x" * 70_000, b"",
    b"\r\n\r\n", b"0;\r\n\r\n",
)  # fmt: skip


def _spoiled(request: Request, pick: random.Random) -> Request:
    seed = pick.getrandbits(32)
    return Request(
        request.method,
        request.target,
        request.headers,
        request.body,
        raw=lambda sent: _spoil(sent, random.Random(seed)),
    )


def _spoil(sent: bytes, pick: random.Random) -> list[bytes | float]:
    head, _, body = sent.partition(b"\r\n\r\n")
    where = pick.randrange(len(sent))
    match pick.randrange(9):
        case 0:
            return [sent[:where]]
        case 1:
            return [sent[:where], 0.5, sent[where:]]
        case 2:
            return [damaged(head, pick) + b"\r\n\r\n" + body]
        case 3:
            return [pick.choice(NOT_HTTP)]
        case 4:
            name = pick.choice(list(ODD_HEADS))
            before, found, after = head.partition(name)
            value, _, rest = after.partition(b"\r\n")
            return (
                [before + name + pick.choice(ODD_HEADS[name]) + b"\r\n" + rest + b"\r\n\r\n" + body]
                if found
                else [value]
            )
        case 5:
            length = head.rpartition(b"\r\ncontent-length: ")[0] or head
            both = b"\r\ncontent-length: 5" if pick.random() < 0.3 else b""
            how = pick.choice(
                (b"chunked", b"gzip, chunked", b"chunked, gzip", b"chunked\r\ntransfer-encoding: chunked", b"x")
            )
            return [length + both + b"\r\ntransfer-encoding: " + how + b"\r\n\r\n" + pick.choice(CHUNKED)]
        case 6:
            many = sent.replace(b"connection: close", b"connection: keep-alive")
            return [many * pick.choice((2, 5, 20)) + pick.choice((b"", b"garbage\r\n\r\n", sent[:where]))]
        case 7:
            version = pick.choice((b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.1 x", b"http/1.1", b""))
            return [head.replace(b"HTTP/1.1", version, 1) + b"\r\n\r\n" + body]
    expecting = head + b"\r\nexpect: 100-continue\r\n\r\n"
    return [expecting, 0.2, body] if pick.random() < 0.5 else [*(bytes([byte]) for byte in sent[:40]), sent[40:]]
