"""Run one round of a federation in this process, and record what its server sees of some clients."""

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.app import ConfigRecord
from torch import Tensor

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import check_run, client_of, new_strategy
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.app.secure_sums import secure_context
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.nothing_to_read import NothingToReadError
from hyperfl_flwr.attacks.readout import read_out
from hyperfl_flwr.attacks.registry import Attack
from hyperfl_flwr.audit.knowledge import public_knowledge
from hyperfl_flwr.audit.neighbour_view import neighbour_observations, save_next_messages
from hyperfl_flwr.audit.observation_files import ObservationFiles, OpeningFiles
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError, RunFailedError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import FederatedData, load_federated_data
from hyperfl_flwr.data.fewer_samples import fewer_samples
from hyperfl_flwr.models.provenance import use_weights
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.protocol.secure_sums.thresholds import MOST_NODES
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.runs.observation import Arrays, Observation, observation_path, opening_path
from hyperfl_flwr.runs.run_data import require_classes, require_dataset
from hyperfl_flwr.runs.run_directory import read_manifest, settings_of
from hyperfl_flwr.runs.run_sources import method_of
from hyperfl_flwr.server.exchange import exchange
from hyperfl_flwr.server.federation import handshake
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from strategies.engine.base import BaseStrategy
from strategies.engine.recorded import restore

Forged = Callable[[Arrays, int], Arrays]
"""Maps arrays that an honest server would send to a client to those that a malicious one sends; the client's id."""

EXPERIMENT = "0" * 16
"""Experiment id of a round that does not belong to a run."""


@dataclass(frozen=True, kw_only=True)
class AttackedRound:
    """A round to attack, and the attacked clients.

    Attributes:
        config: Settings of the round, with every `auto` of the method resolved; `audit.clients` names the clients.
        clients: Ids of the attacked clients.
        trained: Run with the checkpoint and private state from which the round starts; None for fresh parameters.
        summed: Whether the server sees only the sum of these clients' uploads, as with secure sums.
        opened: Whether the server opens that sum, with secure sums; otherwise it is computed from single uploads.
        by_neighbours: Whether the end clients of a chain attack instead of the server, see
            `hyperfl_flwr.audit.neighbour_view`.
        malicious_server: Whether the server forges what it sends, in each attack for that attack.
        samples: Largest number of training samples of each client, drawn from its own; 0 for all.
        recorded_round: Number of the round if a run has recorded it; 0 if it is run for the attack.
        prior: Data set of which the attacker has images; empty for none.
        labels_known: Whether the attacker has the labels of the private images.
    """

    config: RunConfig
    clients: Sequence[int]
    trained: Path | None = None
    summed: bool = False
    opened: bool = False
    by_neighbours: bool = False
    malicious_server: bool = False
    samples: int = 0
    recorded_round: int = 0
    prior: str = ""
    labels_known: bool = False

    @property
    def steps(self) -> list[int]:
        """Number of local steps on the shared parameters of each attacked client."""
        knowledge = self.knowledge()
        return [knowledge.num_steps(size) for size in self.sizes]

    @property
    def sizes(self) -> list[int]:
        """Number of training samples of each attacked client."""
        data = self.data()
        return [len(data.train_indices(client)) for client in self.clients]

    @property
    def augmented(self) -> bool:
        """Whether the clients trained on randomly cropped and flipped images, which an attack then finds."""
        return self.data().dataset.augment

    @property
    def round(self) -> int:
        """Number of the attacked round."""
        ended = Checkpoints(self.trained / "checkpoints").rounds()[-1] if self.trained else 0
        return self.recorded_round or ended + 1

    def allows(self, attack: Attack) -> bool:
        """Return whether the attacker can run an attack on uploads to which it applies."""
        if (self.by_neighbours and not attack.by_neighbours) or (attack.needs_prior and not self.prior):
            return False
        return not (self.opened and attack.gets_hidden)  # only single uploads reveal activations

    def data(self) -> FederatedData:
        """Return the federation's data, with the data set's test samples even where a run is scored on held-back ones.

        Held-back samples are training samples of the data set, among which those of the clients are, too.
        """
        settings = self.config.data_settings()
        with fewer_samples(self.samples):
            return load_federated_data(replace(settings, keeps_test=settings.validation_fraction > 0))

    def knowledge(self, client: int | None = None) -> PublicKnowledge:
        """Return what the server knows of a client, or of the first attacked one, without any message.

        Raises:
            ConfigError: If no attack of this project applies to the data or to the target network.
        """
        dataset = self.data().dataset
        check_run(self.config, dataset.input_shape, dataset.num_classes)
        try:
            return public_knowledge(
                self.config.of_client(self.clients[0] if client is None else client),
                input_shape=dataset.input_shape,
                num_classes=dataset.num_classes,
                mean=dataset.mean,
                std=dataset.std,
            )
        except ValueError as error:
            raise ConfigError(f"{error}; that is no proof of safety") from None


@dataclass(frozen=True, kw_only=True)
class View:
    """The attacker's view of a round.

    Attributes:
        observations: One observation per client, or one of their sum.
        knowledge: Public knowledge of the run.
    """

    observations: Sequence[Observation]
    knowledge: PublicKnowledge


def view(target: AttackedRound, recorded: ObservationFiles) -> View:
    """Return the attacker's view of the recorded observations.

    Raises:
        ConfigError: If the view is a sum, and the clients have unequal numbers of samples.
    """
    knowledge = target.knowledge()
    if target.by_neighbours:
        seen = neighbour_observations(target.config, target.clients, recorded.paths[0].parents[1])
        return View(observations=seen, knowledge=knowledge)
    if not target.summed:
        return View(observations=recorded, knowledge=knowledge)
    sizes = sorted(set(target.sizes))
    if len(sizes) > 1:
        raise ConfigError(f"an attack on a sum needs clients with equally many samples, these have {sizes}")
    return View(observations=[recorded.mean()], knowledge=replace(knowledge, summed_clients=len(target.clients)))


def leaked_activations(target: AttackedRound, recorded: ObservationFiles) -> list[Tensor]:
    """Read HyperFL's activation z [p] of each client off its upload, as a server does that sees single uploads.

    There is none of a client whose upload has nothing to read.
    """
    knowledge, found = target.knowledge(), []
    for observation in recorded:
        with contextlib.suppress(NothingToReadError):
            found.append(read_out(observation, knowledge).hidden)
    return [hidden for hidden in found if hidden is not None]


def record_round(target: AttackedRound, folder: Path, forged: Forged | None = None) -> ObservationFiles:
    """Run one round of a federation in this process and record what the server sees of some clients.

    With secure sums that is what it opens, with the nodes' noise if there is any.

    Args:
        target: Round to run.
        folder: Existing folder for the observations, and for a copy of trained clients' private state.
        forged: Makes what the server sends to all clients, for the first attacked one's network, and to each client
            alone; None if it is honest.

    Raises:
        RunFailedError: If a client fails.
    """
    with fewer_samples(target.samples):
        return _record_round(target, folder, forged)


def _record_round(target: AttackedRound, folder: Path, forged: Forged | None) -> ObservationFiles:
    config = target.config
    secure = secure_context(config)
    # With secure sums each node is one client, as far as a sum can have so many nodes.
    num_nodes = min(config.num_clients, MOST_NODES) if secure else 1
    grid = InProcessGrid(app, num_nodes, config.flat(), {"simulated": True})
    federation = handshake(grid, config.hosted_clients, config.node_timeout, secure.session if secure else "")
    experiment = read_manifest(target.trained)["experiment"] if target.trained else EXPERIMENT
    strategy = new_strategy(config, federation, experiment=experiment, run_directory=str(folder), secure=secure)
    current = target.round
    if target.trained is None:
        arrays = strategy.initial_arrays()
    else:
        arrays = restore(strategy, Checkpoints(target.trained / "checkpoints"), current - 1)
        if client_of(config.method).private:  # a copy: training must not change the run's private state
            shutil.copytree(target.trained / "clients", folder / "clients")
    if forged is not None:
        arrays = pack_arrays(forged(unpack_arrays(arrays), target.clients[0]))
        forge_per_client(strategy, forged)
    messages = strategy.configure_train(current, arrays, ConfigRecord(), grid)
    strategy.reduce(exchange(grid, messages, config.round_timeout))
    for failure in strategy.outcome.failures:
        raise RunFailedError(f"client {failure.client} failed in the round to be attacked: {failure.reason}")
    if target.by_neighbours:
        save_next_messages(strategy.per_client_arrays([0, config.num_clients - 1]), folder)
    if secure:
        return OpeningFiles([opening_path(folder, current)])
    return ObservationFiles([observation_path(folder, current, client) for client in target.clients])


def forge_per_client(strategy: BaseStrategy, forged: Forged) -> None:
    """Forge what a strategy sends to each client alone, such as a generated model.

    What it sends to all clients is an argument of its rounds, and is forged before.
    """
    honest = strategy.per_client_arrays

    def per_client_arrays(clients: Sequence[int]) -> Mapping[int, SharedArrays]:
        return {client: dict(forged(arrays, client)) for client, arrays in honest(clients).items()}

    strategy.per_client_arrays = per_client_arrays  # type: ignore[method-assign] # no strategy of a run forges


def recorded_round(
    run: Path, changes: Mapping[str, Scalar], *, summed: bool = False
) -> tuple[AttackedRound, ObservationFiles]:
    """Return the last round that a run has recorded, and its observations; of a run with secure sums, its opening.

    Args:
        run: Folder of the run.
        changes: Settings of this machine (`data-root`, `device`).
        summed: See `AttackedRound`; a run with secure sums has recorded nothing but sums.

    Raises:
        RunDirectoryError: If nothing was recorded, nodes were malicious, or the samples for scoring are elsewhere.
    """
    method_of(run)  # or says that it is unknown
    config = RunConfig.from_flat(settings_of(run) | dict(changes))
    if config.adversary.share or config.adversary.nodes != "auto":
        raise RunDirectoryError(
            f"{run} has malicious nodes (adversary.attack = {config.adversary.attack}), whose replies are not what "
            f"clients have learned; record a run without them"
        )
    observed = _opening(run) if config.secagg.enabled else _observations(run)
    require_dataset(run)
    require_classes(run)
    config = resolved(config)
    use_weights(config.lpm.weights)
    opened = isinstance(observed, OpeningFiles)
    target = AttackedRound(
        config=config,
        clients=observed.clients,
        summed=summed or opened,
        opened=opened,
        recorded_round=observed[0].round,
    )
    return target, observed


def _observations(run: Path) -> ObservationFiles:
    """Return the observations of the last round that a run without secure sums has recorded."""
    paths = sorted((run / "observations").glob("round-*-client-*.npz"))
    if not paths:
        raise RunDirectoryError(
            f"{run} has recorded nothing; start a run with --set audit.clients=0 --set audit.rounds=1, for example"
        )
    last = paths[-1].name.split("-client-")[0]
    return ObservationFiles([path for path in paths if path.name.split("-client-")[0] == last])


def _opening(run: Path) -> OpeningFiles:
    """Return the opening of the last round that a run with secure sums has recorded."""
    paths = sorted((run / "openings").glob("round-*.npz"))
    if not paths:
        raise RunDirectoryError(
            f"{run} has secure sums and has recorded no opened sum; start a run with --set audit.rounds=1, for example"
        )
    return OpeningFiles(paths[-1:])
