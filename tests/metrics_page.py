"""Writes docs/metrics.md from what the services declare: `python -m tests.metrics_page`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Metric

from bombus.hive.state import Hive
from bombus_coordinator.metrics import CoordinatorMetrics
from bombus_gateway.metrics import CallMetrics, families_of
from bombus_inference.server import HELP
from bombus_inference.server import families_of as of_replica
from bombus_trainer.metrics import TrainerMetrics

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGINNING = """\
# Metrics and traces

What Prometheus and OpenTelemetry see of a hive. The tables are generated from the sources (`python -m
tests.metrics_page`), and a test compares them with what a real hive exposes.

## Scrape a hive

```sh
bombus up --metrics-port 9464
```

| service | where | key |
|---|---|---|
| gateway | `/metrics` on its own port | the client key, if the hive has one; a named one for Prometheus is best |
| replica | `/metrics` on its own port, which `/metrics/replicas` of a gateway lists | `bombus inference --show-key` |
| coordinator, trainer | `/metrics` at `--metrics-port`, on loopback unless `--metrics-host` is given | the same |
| gateways that share a port | the same, since a request to the shared port reaches any of them | the same |

Coordinators and trainers listen only if they are told to. `bombus up --metrics-port 9464` gives that port to the
first coordinator, and the next ones to other coordinators, trainers, and gateways that share a port, in this order;
`bombus up --dry-run` shows them. A process whose port is taken works without metrics until the port is free, and warns
of that. `GET /health` of such a port answers 200 without a key while the process works, for probes.

`deploy/prometheus.yml` scrapes such a hive, `deploy/alerts.yml` has alerts, and `deploy/grafana.json` is a dashboard
to import into Grafana. Several gateways tell the same about the hive, so use `max by (engine) (...)` of
`bombus_hive_...` and `bombus_engine_...`, and sums of the rest. Each process also has `process_cpu_seconds_total`,
`process_resident_memory_bytes` and others of the operating system.

No metric has a label for episodes, tasks, clients, keys or the models that clients name, and none contains a prompt.

## Metrics

"""
TRACES = """\
## Traces

Set OpenTelemetry's variables, such as `OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318`, for the hive, and for
programs with our SDK that should be in the traces too. Without an endpoint nothing is traced, and OpenTelemetry is
not even imported. Spans go out as OTLP over HTTP. The context travels as a W3C `traceparent`, in HTTP headers, in the
headers of messages on the bus, and in the log.

| service | span | what it is |
|---|---|---|
| `bombus-client` | `sdk.group` | a group of `run_group`, from its claim to its end |
| | `invoke_agent` | the caller's function, for one episode |
| | `sdk.request` | a request to the gateway |
| `bombus-gateway` | `gateway.command` | a command, such as a claim or an end, until its answer |
| | `chat`, `text_completion` | a model call, until its record is stored |
| `bombus-coordinator` | `coordinator.decide` | the decision of a message, named by `bombus.message` |
| `bombus-inference` | `inference.generate` | a request to a replica |
| `bombus-trainer` | `trainer.step` | a step, below the message that completed its batch |

An agent whose own client sends no context is traced in the trace in which its episode was claimed, so a group of
`run_group` is one trace. A step has links to the traces of the calls that it trains on, at most 128.

Spans of calls have the attributes `gen_ai.*` of OpenTelemetry's conventions (operation, model, tokens, finish
reasons, sampling), and `gen_ai.conversation.id` is the name of the episode. No span has messages, tools, keys or the
text of an error: an error is its code, as `error.type`.
"""


def documented() -> dict[str, list[tuple[str, str, Sequence[str], str]]]:
    """Return the name, kind, labels and help of each metric, by service."""
    coordinator = CoordinatorMetrics()
    return {
        "Gateways": [*_registered(CallMetrics(["main"]).registry), *map(_described, families_of(Hive(), [], {}))],
        "Coordinators": [*map(_described, [*coordinator.families(None, None), coordinator.decisions])],
        "Trainers": _registered(TrainerMetrics("main").registry),
        "Replicas": [*map(_described, of_replica("main", dict.fromkeys(HELP, 0.0)))],
    }


def _registered(registry: CollectorRegistry) -> list[tuple[str, str, Sequence[str], str]]:
    counted = {id(each): each for each in registry._names_to_collectors.values()}
    return [*map(_described, counted.values())]


def _described(metric: Any) -> tuple[str, str, Sequence[str], str]:
    (found,) = [metric] if isinstance(metric, Metric) else metric.describe()
    name = f"{found.name}_total" if found.type == "counter" else found.name
    return name, found.type, metric._labelnames, found.documentation


def tables() -> Iterator[str]:
    for service, metrics in documented().items():
        yield f"### {service}\n\n| metric | kind | labels | what it is |\n|---|---|---|---|"
        for name, kind, labels, text in metrics:
            yield f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |"
        yield ""


def page() -> str:
    return "\n".join([BEGINNING, *tables(), TRACES])


if __name__ == "__main__":
    PAGE.write_text(page())
