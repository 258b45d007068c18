"""Find the settings with which nodes whose data differ could train together."""

import shlex
from collections import Counter
from collections.abc import Sequence

from hyperfl_flwr.protocol.messages import printable
from hyperfl_flwr.server.handshake import Node

MOST_NUMBERED = 100
"""Largest number of classes without names for which a setting is proposed."""


def suggestion_for(nodes: Sequence[Node]) -> str:
    """Return the options of `hyperfl run` with which the nodes could agree; empty if they agree or none would help.

    The classes are those of all nodes, of which a node need not have each. The shape is that of most nodes, in which
    nodes with folders of images read theirs.

    Args:
        nodes: The nodes that have replied, with untrusted properties.
    """
    found = {"data.classes": _classes(nodes), "data.input-shape": _shape(nodes)}
    return " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in found.items() if value)


def _classes(nodes: Sequence[Node]) -> str:
    named = [[str(name) for name in node.properties.get("classes", ())] for node in nodes]
    if not any(named):
        numbers = {int(node.properties["num-classes"]) for node in nodes}
        return ",".join(map(str, range(max(numbers)))) if len(numbers) > 1 and max(numbers) <= MOST_NUMBERED else ""
    names = sorted({name for some in named for name in some})
    if not all(named) or any("," in name or printable(name) != name for name in names):
        return ""
    return ",".join(names) if any(sorted(some) != names for some in named) else ""


def _shape(nodes: Sequence[Node]) -> str:
    shapes = Counter(tuple(map(int, node.properties["input-shape"])) for node in nodes)
    images = all(len(shape) == 3 for shape in shapes)
    return "x".join(map(str, shapes.most_common(1)[0][0])) if len(shapes) > 1 and images else ""
