"""Reader for untrusted YAML that accepts only plain values of bounded size. This module does not import torch.

Arbitrary YAML is dangerous. For example, a few lines can expand to billions of values through aliases of aliases, a
list can contain itself, and a tag can create any Python object. The reader refuses everything that settings files do
not need, and reports the line number.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yaml import MappingNode, ScalarNode, SequenceNode

    Node = ScalarNode | SequenceNode | MappingNode

Plain = None | bool | str | list[str] | dict[str, str]
"""Value that the function `plain` returns for a YAML node. An empty mapping represents any node that `plain` does not
convert."""

MOST_BYTES = 16 * 2**20
"""Maximum file size in bytes."""

MOST_VALUES = 100_000
"""Maximum number of values in a file, including repetitions through aliases."""

DEEPEST = 50
"""Maximum depth of nested lists and mappings."""

PLAIN = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")
"""YAML tags of the values that a settings file may contain."""

TAG = "tag:yaml.org,2002:"


def read_yaml_file(path: str | Path) -> str:
    """Return the text of a YAML file. Raises OSError or ValueError if the file cannot be read."""
    with Path(path).open("rb") as file:  # not `read_text`, because the path may be a pipe from the shell
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"is larger than {MOST_BYTES >> 20} MiB")
    return data.decode("utf-8")


def compose_yaml(text: str, any_tag: bool = False) -> Node | None:
    """Parse YAML text to nodes. Return None for an empty text.

    Raises ValueError with a one-line message if the text is not YAML, or contains values that settings files may not
    use. `any_tag` also permits values with application tags, which remain nodes.
    """
    import yaml  # imported here, because most runs do not need yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise ValueError("values nest too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if node is None:
        return None
    assert isinstance(node, yaml.ScalarNode | yaml.SequenceNode | yaml.MappingNode)
    _Check(any_tag).measure(node)
    return node


def load_yaml(text: str) -> object:
    """Parse a YAML text, and return its value. Raises ValueError with a one-line message if the text is invalid."""
    import yaml

    node = compose_yaml(text)
    try:
        return None if node is None else yaml.SafeLoader("").construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"a value cannot be read: {' '.join(str(error).split())[:200]}") from None


class _Check:
    """Checker that measures how many values and nested levels nodes contain. A node to which several aliases refer is
    measured only once."""

    def __init__(self, any_tag: bool) -> None:
        self._any_tag = any_tag
        self._known: dict[int, tuple[int, int] | None] = {}
        """Results of `measure`, keyed by node id. The result is None while a node is being measured."""

    def measure(self, node: Node) -> tuple[int, int]:
        """Return the number of values in a node, and the number of nested levels of lists and mappings in it. Raises
        ValueError if the node has a tag that settings files may not use, or too many values or levels."""
        if id(node) in self._known:
            if (known := self._known[id(node)]) is None:
                raise _refused(node, "contains itself")
            return known
        self._known[id(node)] = None
        kind = node.tag.removeprefix(TAG)
        if kind not in PLAIN and not self._any_tag:
            raise _refused(node, f"has the tag !!{kind}; use text, numbers, true, false, lists or mappings")
        values, levels = 1, 0
        for child in self._children(node):
            of_child = self.measure(child)
            values, levels = values + of_child[0], max(levels, of_child[1] + 1)
        if values > MOST_VALUES:
            raise _refused(node, f"stands for more than {MOST_VALUES:,} values, as its aliases are repeated")
        if levels > DEEPEST:
            raise _refused(node, f"nests more than {DEEPEST} levels deep")
        self._known[id(node)] = values, levels
        return values, levels

    def _children(self, node: Node) -> list[Node]:
        if node.id == "scalar":
            return []
        if node.id == "sequence":
            return list(node.value)
        for key, _ in node.value:
            if key.id != "scalar":
                raise _refused(key, "uses a list or a mapping as a key; use a name")
        return [part for pair in node.value for part in pair]


def _refused(node: Node, why: str) -> ValueError:
    return ValueError(f"line {node.start_mark.line + 1}: a value {why}")


def compose(path: str) -> Node | None:
    """Parse a YAML file to nodes with string keys. Raises OSError or ValueError if the file cannot be read."""
    return compose_yaml(read_yaml_file(path))


def plain(node: Node) -> Plain:
    """Convert a YAML node to None, a bool, a string, or a list of strings. Numbers remain strings, which the caller
    converts to the types of configuration fields.

    A mapping, or a list that contains lists or mappings, is not a plain value. Return an empty mapping in this case.
    """
    if node.id == "sequence" and all(item.id == "scalar" for item in node.value):
        return [item.value for item in node.value]
    if node.id != "scalar":
        return {}
    if node.tag.endswith(":bool"):
        return BOOLS.get(node.value.lower(), node.value)
    return None if node.tag.endswith(":null") and node.value.lower() in NULLS else node.value


BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NULLS = ("", "~", "null")


def texts_of(value: object) -> list[str]:
    """Convert a plain YAML value to the words that would follow the flag on a command line."""
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]
