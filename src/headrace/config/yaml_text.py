"""YAML as run files use it: what TOML could say, too, and nothing surprising.

Two of the language's habits are left out on purpose: a key given twice is an error, and `1e-5` is a number.
"""

from __future__ import annotations

import re
from typing import Any

import yaml  # type: ignore[import-untyped]

from headrace.errors import BadInput

FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")

MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def compose_mapping_node(self, anchor: Any) -> Any:
        """Keys are compared as they stand: what `<<` brings along later may be given again, and then yields."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add((key.tag, key.value))
        return node


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """Return the plain tree of a YAML document; raise `BadInput` with the line of what is wrong."""
    try:
        tree = yaml.load(text, _Loader)  # a safe loader: it makes plain values alone
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        column = "" if mark is None else f" (column {mark.column + 1})"
        words = ", ".join(part for part in (error.context, error.problem) if part)
        raise BadInput(f"not valid YAML: {words}{column}", line=None if mark is None else mark.line + 1) from error
    except yaml.YAMLError as error:
        raise BadInput(f"not valid YAML: {error}") from error
    return {} if tree is None else tree
