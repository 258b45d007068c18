"""Settings of differential privacy: for single records by noisy steps, for whole clients by noise on uploads."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from hyperfl_flwr.core.setting_types import CLIP_NORMS
from hyperfl_flwr.core.settings import NonNegativeFloat, Section, setting

if TYPE_CHECKING:
    from hyperfl_flwr.protocol.secure_sums.noise import SumNoise


LARGEST_EPSILON, LARGEST_DELTA = 500, 0.1
"""Largest budget that `hyperfl_flwr.privacy.accounting` computes; with a larger delta, a bound might not hold."""

Delta = Annotated[float, Field(gt=0, le=LARGEST_DELTA)]


class RecordPrivacyConfig(Section):
    """Record-level privacy: local training by noisy steps (DP-SGD) bounds what parameters reveal about one record."""

    key: ClassVar[str] = "dp"
    title: ClassVar[str] = "Differential privacy of single records"

    epsilon: Annotated[float, Field(ge=0, le=LARGEST_EPSILON)] = setting(
        0.0,
        "Privacy budget ε of each client over all rounds of the run; the noise of a step follows from it. 0 trains "
        "without noise. For the methods whose local training has noisy steps; others are refused by name. "
        "Batches and noise come from the operating system's random generator, so that such runs are not repeatable.",
    )
    delta: Delta = setting(1e-5, "Privacy parameter δ that belongs to `dp.epsilon`.")
    clip_norm: Annotated[float, Field(ge=CLIP_NORMS[0], le=CLIP_NORMS[1])] = setting(
        1.0,
        "Largest norm of one sample's gradient, over all parameters that are trained with noise.",
        values="number from 10^-6 to 10^6",
    )
    heads: Literal["noised", "published"] = setting(
        "noised",
        "How the private classifiers are trained.\n\n"
        "`noised`: by the same noisy steps as the shared parameters; then ε holds. `published`: without noise, as in "
        "the papers of CENTAUR and PPSGD; then no ε holds, because a record moves the classifier, and the classifier "
        "moves the gradients of all other records.",
    )


class PrivacyConfig(Section):
    """Client-level privacy with `privacy.unit = client`, else plain clipping and noise on what a client uploads."""

    key: ClassVar[str] = "privacy"
    title: ClassVar[str] = "Clipping and noise on uploads"

    unit: Literal["none", "client"] = setting(
        "none",
        "What the noise protects. `client`: everything that a client contributes to the run, with a stated ε; all "
        "clients have the same weight. `none`: noise without a stated guarantee (obfuscation).",
    )
    clip_norm: NonNegativeFloat = setting(
        0.0, "Largest norm C of the change that a client uploads, over all of its arrays; 0 does not clip."
    )
    noise_multiplier: NonNegativeFloat = setting(
        0.0,
        "Standard deviation z of the Gaussian noise, in units of `privacy.clip-norm`. The noise comes from the "
        "operating system's random generator, so that such runs are not repeatable.",
    )
    noise: Literal["local", "server", "sum"] = setting(
        "local",
        "Where the noise is added; `server` and `sum` need `privacy.unit = client`.\n\n"
        "`local`: to every client's upload, which protects it from the server, too, and is √N times larger in the "
        "mean of N clients. `server`: to the sum, by the server, which must be trusted. `sum`: to the sum, as shares "
        "of the nodes inside a secure sum (`secagg.enabled`), so that neither the server nor another node sees less "
        "noise.",
    )
    delta: Delta = setting(1e-5, "Privacy parameter δ of the stated ε, with `privacy.unit = client`.")
    server_rate: Annotated[float, Field(gt=0, le=1)] = setting(
        1.0,
        "Share of the mean change of a round that the server applies, with `privacy.unit = client`; a smaller one "
        "averages the noise of several rounds.",
    )

    @field_validator("unit", mode="before")
    @classmethod
    def _not_records(cls, value: object) -> object:
        if value == "record":
            raise ValueError("must be none or client, got 'record'; noise for single records is that of dp.epsilon")
        return value

    @field_validator("noise_multiplier")
    @classmethod
    def _needs_clipping(cls, value: float, info: ValidationInfo) -> float:
        if value and not info.data.get("clip_norm"):
            raise ValueError(f"must be 0 without privacy.clip-norm, which it multiplies; got {value:g}; set both")
        return value

    @field_validator("noise")
    @classmethod
    def _needs_unit(cls, value: str, info: ValidationInfo) -> str:
        if value != "local" and info.data.get("unit") == "none":
            raise ValueError(f"must be local without privacy.unit=client; got {value!r}")
        return value

    @field_validator("server_rate")
    @classmethod
    def _changed_with_unit(cls, value: float, info: ValidationInfo) -> float:
        if value != 1 and info.data.get("unit") == "none":
            raise ValueError(f"must be 1 without privacy.unit=client; got {value:g}")
        return value

    @property
    def protects_clients(self) -> bool:
        """Whether an ε is stated for whole clients."""
        return self.unit == "client"

    @property
    def local_std(self) -> float:
        """Standard deviation of the noise that each client adds to its upload; 0 without `privacy.noise = local`."""
        return self.noise_multiplier * self.clip_norm if self.noise == "local" else 0.0

    @property
    def least_range(self) -> float:
        """Range of the changes in a secure sum that is wide enough for `local_std`; 0 for no demand."""
        return self.clip_norm + 8 * self.local_std if self.local_std else 0.0

    @property
    def sum_noise(self) -> "SumNoise | None":
        """The noise that nodes add to a secure sum; None unless `privacy.noise = sum`."""
        if self.noise != "sum":
            return None
        from hyperfl_flwr.protocol.secure_sums.noise import SumNoise  # deferred: imports cryptography

        return SumNoise(clip_norm=self.clip_norm, multiplier=self.noise_multiplier)
