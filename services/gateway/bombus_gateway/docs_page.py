"""`/docs`: a gateway's routes as one HTML page, generated from its OpenAPI document.

The page has no scripts and loads nothing, so it works without a network and runs no third-party code.
"""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
code, pre { font: 13px/1.45 ui-monospace, monospace }
pre { background: #f4f4f1; padding: .8rem; overflow-x: auto }
details { border-bottom: 1px solid #ddd; padding: .35rem 0 }
summary { cursor: pointer }
summary b { display: inline-block; width: 4rem; color: #8a6100 }
@media (prefers-color-scheme: dark) { body { background: #0d1014; color: #d7dde5 } pre { background: #1a2029 } }
"""


def docs_page(document: Mapping[str, Any]) -> str:
    """Return the page for an OpenAPI document. Routes under `/e/`, which repeat those at the root, are left out."""
    info = document["info"]
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        if not path.startswith("/e/"):
            for method, operation in operations.items():
                tag = (operation.get("tags") or ["other"])[0]
                groups.setdefault(tag, []).append("".join(_route(method, path, operation)))
    body = "".join(f"<h2>{escape(tag)}</h2>\n{''.join(routes)}" for tag, routes in sorted(groups.items()))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(info['title'])}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(info['title'])}</h1>\n<p>{escape(info.get('description', ''))}</p>\n"
        '<p>The same as an OpenAPI document, for programs: <a href="openapi.json">openapi.json</a>. Each engine has '
        f"these routes under <code>/e/NAME</code> too.</p>\n{body}</body>\n</html>\n"
    )


def _route(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of one route's section."""
    head = f"<b>{escape(method.upper())}</b> <code>{escape(path)}</code> {escape(operation.get('summary', ''))}"
    yield f"<details><summary>{head}</summary>\n"
    if operation.get("description"):
        yield f"<p>{escape(operation['description'])}</p>\n"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = json.dumps(content.get("schema", {}), indent=2, ensure_ascii=False)
        yield f"<p>Its body, <code>{escape(kind)}</code>:</p>\n<pre>{escape(schema)}</pre>\n"
    answers = "".join(
        f"<li><code>{escape(status)}</code> {escape(answer.get('description', ''))}</li>"
        for status, answer in operation.get("responses", {}).items()
    )
    yield f"<ul>{answers}</ul></details>\n"
