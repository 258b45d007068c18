"""The parts of TensorBoard's event files that can be tested without the package."""

import pytest

from hyperfl_flwr.core.errors import InstallationError
from hyperfl_flwr.launch.tensorboard import require_tensorboard
from hyperfl_flwr.runs.scalars import tag


def test_without_the_package_the_command_to_install_it_is_told() -> None:
    with pytest.raises(InstallationError, match=r"python -m pip install 'tensorboard>=2\.16,<3'"):
        require_tensorboard(lambda _: None)


@pytest.mark.parametrize(
    ("name", "place"),
    [("personalized_accuracy", "accuracy/personalized"), ("bytes_on_wire", "bytes/on_wire"), ("seconds", "seconds/all"),
     ("theta_norm", "other/theta_norm"), ("client_seconds", "seconds/client")],
)  # fmt: skip
def test_metrics_are_sorted_by_what_they_measure(name: str, place: str) -> None:
    assert tag(name) == place
