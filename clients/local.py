"""Local-only training: FedAvg's client with a private model."""

from typing import ClassVar

from clients.engine.base import BaseClient


class LocalClient(BaseClient):
    """Trains its private model alone; all clients start from FedAvg's initial model."""

    private: ClassVar[tuple[str, ...]] = ("model",)
