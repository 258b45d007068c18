"""Fixtures shared by the deployment tests."""

from collections.abc import Iterator

import pytest
from programs import LocalDeployment, local_deployment


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """Return a deployment with two nodes, over TLS and with authentication, of which nothing was started."""
    with local_deployment(tmp_path_factory.mktemp("deployed") / "fl", 2) as made:
        yield made


@pytest.fixture(scope="module")
def two_nodes(prepared: LocalDeployment) -> LocalDeployment:
    """Return a deployment with a SuperLink and two online SuperNodes."""
    if not prepared.server.alive:
        prepared.start_server()
    prepared.start_nodes()
    return prepared
