"""Names of the built-in target networks, which settings are checked against without importing torch."""

from collections.abc import Mapping

TARGETS: Mapping[str, str] = {
    "cnn": "hyperfl_flwr.models.targets:build_cnn",
    "lenet": "hyperfl_flwr.models.targets:build_lenet",
    "mlp": "hyperfl_flwr.models.targets:build_mlp",
    "mlp-500": "hyperfl_flwr.models.targets:build_mlp_500",
    "resnet18": "hyperfl_flwr.models.targets:build_resnet18",
}
"""Builders of the target networks by name, each as `package.module:function`.

A builder takes the shape of a sample and the number of classes, and returns a `hyperfl_flwr.models.target.Target` on
the meta device.
"""
