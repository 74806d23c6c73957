"""YAML without anchors, aliases, merge keys, deep nesting or very long numbers, any of which can make a short text
costly to load.

With them, 416 bytes took seven seconds to load, and 100 KB took more than a gigabyte of memory. Dates are read as text:
no setting is a date, and a run may be named after one.
"""

from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode
from yaml.scanner import ScannerError

DEPTH_MAX = 32
NODES_MAX = 4096  # the most keys and values
NUMBER_CHARACTERS_MAX = 64

_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_MERGE = "tag:yaml.org,2002:merge"
_NO_REFERENCES = "anchors (&), aliases (*) and merge keys (<<) are not accepted: write the value out"


def load(text: str) -> object:
    """Parse a YAML text. Raises `yaml.YAMLError`, or `ValueError` for an invalid scalar."""
    return yaml.load(text, _PlainLoader)


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc] # PyYAML has no types
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._nodes = 0

    def fetch_flow_collection_start(self, token: Any) -> None:
        """Refuse deeply nested brackets in the scanner, since every level slows the scanner itself down."""
        if self.flow_level >= DEPTH_MAX:
            raise ScannerError(None, None, _nested(), self.get_mark())
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: Any, index: Any) -> Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise ComposerError(None, None, _NO_REFERENCES, event.start_mark)
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise ComposerError(None, None, f"there are more than {NODES_MAX} keys and values", event.start_mark)
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise ComposerError(None, None, _nested(), event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def flatten_mapping(self, node: MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == _MERGE:
                raise ConstructorError(None, None, _NO_REFERENCES, key.start_mark)

    def construct_yaml_int(self, node: ScalarNode) -> int:
        _check_number(node)
        return int(super().construct_yaml_int(node))

    def construct_yaml_float(self, node: ScalarNode) -> float:
        _check_number(node)
        return float(super().construct_yaml_float(node))


_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_yaml_int)
_PlainLoader.add_constructor("tag:yaml.org,2002:float", _PlainLoader.construct_yaml_float)


def _check_number(node: ScalarNode) -> None:
    if len(node.value) > NUMBER_CHARACTERS_MAX:
        why = f"a number has more than {NUMBER_CHARACTERS_MAX} characters"
        raise ConstructorError(None, None, why, node.start_mark)


def _nested() -> str:
    return f"it is nested deeper than {DEPTH_MAX}"
