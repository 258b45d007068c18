"""What the tests of deployments share."""

from collections.abc import Iterator

import pytest
from programs import LocalDeployment, local_deployment


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """Return a SuperLink and two SuperNodes that are online, over TLS and with authentication."""
    with local_deployment(tmp_path_factory.mktemp("deployed") / "fl", 2) as made:
        made.start()
        yield made
