"""Flower's logger: its lines appear in the run's log among Flower's own lines.

Wraps `flwr.supercore.logger`: the `logging.Logger` and its method `log(level, text, *values)`. Flower's public packages
offer no logger, and other loggers of an app do not reach the SuperLink.
"""

from flwr.supercore.logger import FLOWER_LOGGER, log

__all__ = ["FLOWER_LOGGER", "log"]
