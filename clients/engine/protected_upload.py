"""Clip a client's upload and add noise to it as `privacy.*` says, and state what it releases about the client."""

from collections.abc import Mapping
from logging import WARNING
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from clients.engine.context import ClientContext
from hyperfl_flwr.config.privacy import PrivacyConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.flower.log import log
from hyperfl_flwr.privacy.clip_and_noise import protect
from hyperfl_flwr.privacy.release import Release
from hyperfl_flwr.protocol.messages import Reduction


class ProtectedUpload:
    """Clipping and noise on a client's upload.

    Attributes:
        context: The client's context.
        shared: Names of the shared groups, and the reduction of each on the server.
        keeps_upload: Whether the client keeps a part of its upload, which must be what the server has received: nothing
            of it may be cut off in a secure sum.
        unclippable: Why an upload may not differ from what the client has computed (`privacy.clip-norm`); empty if it
            may.
    """

    context: ClientContext
    shared: ClassVar[Mapping[str, Reduction]] = {}
    keeps_upload: ClassVar[bool] = False
    unclippable: ClassVar[str] = ""

    @property
    def must_finish(self) -> bool:
        """Whether a client that has diverged finishes its round without a change, and does not fail.

        Where an ε is stated for its whole upload, or the owner limits it, a failure would leave the node without noise:
        a server could craft a model, or a normalisation, that overflows only if a certain record is there.
        """
        config, budget = self.context.config, self.context.budget
        is_limited = budget is not None and budget.max_epsilon is not None
        return is_limited or config.privacy.protects_clients or config.weight_epsilon > 0

    @classmethod
    def reductions(cls, config: RunConfig) -> Mapping[str, Reduction]:
        """Return the reduction of each shared group in a run; with `privacy.unit = client` all weights are equal.

        A weight by the number of samples would multiply what a client can change. The numbers themselves stay visible.
        """
        return cls.weighted(equal=config.privacy.protects_clients)

    @classmethod
    def weighted(cls, *, equal: bool) -> Mapping[str, Reduction]:
        """Return the reduction of each shared group; with `equal`, clients have equal weights in all means."""
        if not equal:
            return cls.shared
        by_examples, mean = Reduction.MEAN_BY_EXAMPLES, Reduction.MEAN
        return {group: mean if each is by_examples else each for group, each in cls.shared.items()}

    def protected(self, received: list[NDArray[Any]], trained: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the trained arrays after clipping their change and adding noise to it, as `privacy.*` says.

        With `privacy.unit = client` they are returned unchanged: `protected_upload` protects what a reply holds.
        """
        privacy = self.context.config.privacy
        return trained if privacy.protects_clients else _protected(privacy, received, trained)


def protected_upload(
    privacy: PrivacyConfig, received: list[NDArray[Any]], reply: list[NDArray[Any]]
) -> list[NDArray[Any]]:
    """Return the arrays that are sent instead of a client's reply, so that no method can leave out clipping or noise.

    With `privacy.unit = client` the change from the received arrays is clipped, and with `privacy.noise = local` gets
    noise; one that is not finite is replaced by no change, see `ProtectedUpload.must_finish`. Otherwise the reply is
    returned unchanged.

    Args:
        privacy: The settings.
        received: The arrays that the client received.
        reply: The arrays of its reply.
    """
    if not privacy.protects_clients:
        return reply
    if not _is_finite_change(received, reply):
        log(WARNING, "the change of a client is not finite; its upload has no change but that of the noise")
        reply = received
    return _protected(privacy, received, reply)


def _is_finite_change(received: list[NDArray[Any]], reply: list[NDArray[Any]]) -> bool:
    pairs = zip(received, reply, strict=True)
    return all(np.isfinite(np.subtract(after, before, dtype=np.float64)).all() for before, after in pairs)


def _protected(privacy: PrivacyConfig, received: list[NDArray[Any]], trained: list[NDArray[Any]]) -> list[NDArray[Any]]:
    if not privacy.clip_norm:
        return trained
    noise = privacy.noise_multiplier if privacy.noise == "local" else 0.0
    return protect(received, trained, clip_norm=privacy.clip_norm, noise_multiplier=noise)


def client_release(config: RunConfig) -> Release | None:
    """Return what an upload releases about a whole client; None without noise.

    With `privacy.noise = sum`, the nodes' shares of the noise count only if the sum is secure.
    """
    privacy = config.privacy
    if not (privacy.protects_clients and privacy.noise_multiplier):
        return None
    if privacy.noise == "sum":
        if not config.secagg.enabled:
            return None
        return Release(
            unit="client",
            mechanism="discrete-gaussian",
            noise_multiplier=privacy.noise_multiplier,
            bounded_by="nodes",
        )
    return Release(
        unit="client",
        mechanism="gaussian",
        noise_multiplier=privacy.noise_multiplier,
        bounded_by="server" if privacy.noise == "server" else "client",
    )
