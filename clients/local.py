"""Local-only training: FedAvg's client, but its model is private."""

from typing import ClassVar

from clients.engine.base import BaseClient


class LocalClient(BaseClient):
    """Trains alone; all clients start from the model that FedAvg starts from."""

    private: ClassVar[tuple[str, ...]] = ("model",)
