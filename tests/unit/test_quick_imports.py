"""Garbage collection rests during imports, and only then."""

import gc

import pytest

from hyperfl_flwr.core.packages.quick_imports import quick_imports


def failing_import() -> None:
    assert not gc.isenabled()
    raise ImportError


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_suspended_and_then_as_before(*, enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ImportError), quick_imports():
            failing_import()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
