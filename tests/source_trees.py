"""Syntax trees of the project's files, which several tests read."""

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file; nobody may change it."""
    return ast.parse(path.read_text())
