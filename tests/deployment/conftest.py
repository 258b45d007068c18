"""Fixtures shared by the deployment tests."""

from collections.abc import Iterator

import pytest
from programs import LocalDeployment, local_deployment


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """Return a deployment with a SuperLink and two online SuperNodes, over TLS and with authentication."""
    with local_deployment(tmp_path_factory.mktemp("deployed") / "fl", 2) as made:
        made.start()
        yield made
