"""Set up a node for a message: combine the run's settings with the owner's, load the data, and build the clients."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from logging import WARNING
from pathlib import Path

import torch
from flwr.app import ConfigRecordValues

from clients.engine import adapter
from clients.engine.base import BaseClient
from clients.engine.cohort_trainer import trainer_of
from clients.engine.context import client_setting
from clients.engine.node_checks import checks_of
from clients.engine.poisoning import with_adversary
from hyperfl_flwr.app.adversary import adversary_problem
from hyperfl_flwr.app.budget import budget_of, refuse_own_as_public, refuse_unbounded
from hyperfl_flwr.app.data_properties import data_properties
from hyperfl_flwr.app.keep_and_cross_site import check_cross_site
from hyperfl_flwr.app.methods import check_privacy, check_secure_sum, client_of
from hyperfl_flwr.app.place import place_in
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.app.secure import secure_node
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings, resumable_changes, training_autos
from hyperfl_flwr.core.arithmetic import set_arithmetic
from hyperfl_flwr.core.device import resolve_device
from hyperfl_flwr.core.errors import ConfigError, RefusalError
from hyperfl_flwr.core.packages.versions import shared_versions
from hyperfl_flwr.core.rng import seed_for
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.digests import sample_digest
from hyperfl_flwr.data.federated_data import FederatedData, load_local_data
from hyperfl_flwr.data.run_cache import data_of_run
from hyperfl_flwr.data.sample_format import refuse_own_statistics, title_of
from hyperfl_flwr.flower.log import log
from hyperfl_flwr.models.provenance import method_hash, needs_files, network_hash, use_weights
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.node.data_versions import Version, changed_text, note
from hyperfl_flwr.node.private_state import PrivateState, state_folder
from hyperfl_flwr.node.run_record import keep_record
from hyperfl_flwr.node.secure_cohort import SecureCohort
from hyperfl_flwr.node.secure_sums import SecureTerms
from hyperfl_flwr.privacy.secret_rotation import read_key, run_key
from hyperfl_flwr.protocol.hosting import clients_of_node
from hyperfl_flwr.protocol.messages import Request
from hyperfl_flwr.protocol.queries import CROSS_SITE, WITHHOLDS_METRICS
from hyperfl_flwr.protocol.secure_sums.header import Phase, settings_digest


class NodeApp:
    """A node's settings, data and clients during one message.

    Args:
        node: The node's config.
        run_config: The run's settings, as Flower passes them to apps.

    Raises:
        ConfigError: If the run's settings are wrong, or do not fit the node config.
        RefusalError: If the node's owner does not allow the run, or the node takes no part in it.
    """

    def __init__(self, node: NodeConfig, run_config: Mapping[str, Scalar]) -> None:
        self.node = node
        self.simulated = node.simulated
        self.config = resolved(node.applied_to(run_config))
        self._received = run_config
        self.has_owners_data = self.config.dataset != run_config["dataset"]
        self.partition, self.num_nodes = place_in(node, run_config)
        if problem := adversary_problem(self.config, simulated=self.simulated):
            raise RefusalError(problem)
        self.is_malicious = self.partition in self.config.adversary.malicious_nodes(self.config.seed, self.num_nodes)
        if self.node.has_local_data and self.num_nodes != self.config.hosted_clients:
            raise RefusalError(
                f"a node with local data hosts exactly one client: num-clients plus novel.clients must be the "
                f"number of nodes, {self.num_nodes}, got {self.config.hosted_clients}"
            )
        self.clients = clients_of_node(self.partition, self.num_nodes, self.config.hosted_clients)
        refuse_unbounded(node, self.config, self.clients)
        refuse_own_as_public(self.config, simulated=self.simulated)
        self.cross_site = self.config.cross_site and (self.simulated or self.node.cross_site)
        self.keeps_model = self.cross_site or not self.simulated
        if self.node.keep_model is not None:
            self.keeps_model = self.node.keep_model
        self.mixing_secret = self._mixing_secret()
        use_weights(self.config.lpm.weights)
        self.device = resolve_device(self.config.device)
        set_arithmetic(self.config.precision, deterministic=self.config.deterministic, device=self.device)
        if self.config.threads != "auto":
            torch.set_num_threads(self.config.threads)
        elif self.simulated:  # other nodes share the machine
            torch.set_num_threads(1)

    def data(self, run: str = "", *, divided: bool = True) -> FederatedData:
        """Return the data of all clients, or only of this node's client if the data are the node's own; read once.

        Args:
            run: Id of the run, see `data_of_run`; empty to read files again that have been replaced.
            divided: False to hold back no validation data, so that no error depends on how many samples there are.

        Raises:
            RefusalError: If noisy steps cannot protect them, see `refuse_own_statistics`, or the run's class weights
                single out an owner's samples, see `Weighting.refuse_isolation`.
        """
        settings = self.config.data_settings()
        settings = settings if divided else replace(settings, validation_fraction=0.0)
        if not self.simulated:
            settings.weighting.refuse_isolation()
        if not self.node.has_local_data:
            return data_of_run(settings, run)
        cache = None if self.simulated else state_folder(self.node.state_dir, "", simulated=False)
        sample_format = replace(settings.sample_format, has_owner=True, cache=cache)
        data = load_local_data(replace(settings, sample_format=sample_format), self.partition)
        refuse_own_statistics(own_statistics=data.dataset.own_statistics and self.config.dp.epsilon > 0)
        return data

    def cohort(self, request: Request, note: Callable[[str], None]) -> adapter.Cohort:
        """Return the cohort that trains or evaluates the clients of a request.

        Args:
            request: The request.
            note: Writes what a check of the node's owner has found to the node's ledger.

        Raises:
            RefusalError: If this node does not host one of the clients, or `dp.*`, `privacy.*` or secure sums do not
                hold with the run's settings.
        """
        if foreign := sorted(set(request.clients) - set(self.clients)):
            raise RefusalError(f"this node hosts the clients {self.clients}, but the message is for {foreign}")
        client_class = client_of(self.config.method)
        data = self.data(request.experiment)
        try:  # not in the handshake: an honest server checks then, and reports a wrong setting better
            check_cross_site(self.config, client_class)
            check_privacy(self.config, data.dataset.input_shape, data.dataset.num_classes)
            check_secure_sum(self.config)
        except ConfigError as error:  # its texts quote only the run's settings
            raise RefusalError(str(error)) from None
        states, key = self.states(request), self._mixing_key(request.experiment)
        cross_site = self.cross_site
        if self._has_state_of_runs:
            cross_site = self._keep_record(states)
        # A simulated node that is asked outside a run has no folder, and no data of its own to account for.
        keeps_record = bool(self.node.state_dir or request.run_directory or not self.simulated)
        record = state_folder(self.node.state_dir, request.run_directory, simulated=self.simulated)

        def make_client(client: int) -> BaseClient:
            state = PrivateState(states, request.experiment, client)
            setting = client_setting(self.config.of_client(client), data, client, self.device, state, key)
            budget = budget_of(self.node, record, request.experiment, client) if keeps_record else None
            setting = replace(setting, round=request.round, budget=budget, keeps_evaluations=not self.simulated)
            setting = replace(setting, checks=checks_of(self.node, note))
            if self.keeps_model:
                setting = replace(setting, keeps_model=True, trained_on=partial(data.train_digests, client))
            made = client_class(with_adversary(setting, is_malicious=self.is_malicious))
            made.require_size(scores=self.node.sends_metrics)
            return made

        return adapter.Cohort(
            make_client=make_client,
            trainer=trainer_of(client_class, self.config, self.device, make_client),
            reductions=client_class.reductions(self.config),
            send_details=self.simulated,
            sends_metrics=self.node.sends_metrics,
            secure=self._secure_cohort() if self.config.secagg.enabled else None,
            cross_site=cross_site,
        )

    def _secure_cohort(self) -> SecureCohort:
        """Return the node's side of secure sums."""
        config, client_class = self.config, client_of(self.config.method)

        def metric_names(phase: Phase, server_round: int) -> tuple[str, ...]:
            return client_class.metric_names(config, phase, server_round)

        terms = SecureTerms(
            settings=settings_digest(self._settings()),
            num_clients=config.hosted_clients,
            reductions=client_class.reductions(config),
            range=config.secagg.range,
            max_examples=config.secagg.max_examples,
            max_update_ratio=config.max_update_ratio,
            least_range=config.privacy.least_range,
            noise=config.privacy.sum_noise,
            local_noise=config.privacy.local_std,
            colluding=config.secagg.colluding_of(self.num_nodes),
            cuts_off=not (client_class.keeps_upload or client_class.unclippable),
            metric_names=metric_names,
        )
        node = secure_node(self.node, self.num_nodes)
        if self.simulated:  # there is no owner, so the run's numbers hold unless the node config has others
            if self.node.max_colluding == "auto":
                node = replace(node, max_colluding=terms.colluding)
            if "min_cohort" not in self.node.model_fields_set:
                node = replace(node, min_cohort=config.secagg.min_cohort)
        return SecureCohort(node=node, terms=terms)

    def _mixing_secret(self) -> bytes:
        """Return the owner's secret for `priv-hfl.mixing`; empty without mixing, or in a simulation without key file.

        Raises:
            ConfigError: If the run uses mixing, and a deployed node has no valid key file.
        """
        file, dual = self.node.mixing_key_file, client_of(self.config.method).public_training(self.config).dual
        if dual is None or not dual.mixed or (not file and self.simulated):
            return b""
        if not file:
            text = (
                "priv-hfl.mixing needs a secret that all nodes have, but not the server: start the SuperNode with "
                "mixing-key-file='/path/to/file' in --node-config"
            )
            raise ConfigError(text, public=text)
        return read_key(Path(file))

    def _mixing_key(self, experiment: str) -> bytes:
        """Return the run's mixing key, derived from the owner's secret, or in a simulation from the public seed."""
        if self.mixing_secret:
            return run_key(self.mixing_secret, experiment)
        return seed_for(self.config.seed, "mixing").to_bytes(8, "big")

    def states(self, request: Request) -> Path:
        """Return the folder of the clients' private state: in the owner's state-dir, or in a simulation the run's."""
        folder = state_folder(self.node.state_dir, request.run_directory, simulated=self.simulated)
        return folder / request.experiment if self._has_state_of_runs else folder

    @property
    def _has_state_of_runs(self) -> bool:
        """Whether private state is in a folder for several runs, such as an owner's, and not in that of one run."""
        return bool(self.node.state_dir) or not self.simulated

    def _keep_record(self, states: Path) -> bool:
        """Record the run, or refuse a message that does not fit its record; returns whether models may leave."""
        method, in_use = self.config.method, self.config.flat()
        may_change = resumable_changes(method)
        if self.config.dp.epsilon:  # the noise of all steps was computed for that number of rounds
            may_change -= {"num-rounds"}
        return keep_record(
            states,
            # A resumed run may have `auto` or its number.
            self._settings() | {key: in_use[key] for key in training_autos(method)},
            defaults=default_settings(method),
            may_change=may_change,
            allows_matrix=self.cross_site,
        )

    def _settings(self) -> dict[str, Scalar]:
        """Return all settings of the run as the server has sent them, without those of the node's owner."""
        return RunConfig.from_flat(self._received).flat()

    def _note_version(self, data: FederatedData) -> None:
        """Record the version of the owner's data, and log a warning if they have changed since the last run."""
        title = title_of(self.config.dataset)
        # The digest is of the samples as this run reads them.
        agreed = replace(self.config.data_settings().sample_format, normalisation=None, cache=None)
        form = hashlib.sha256(repr((agreed, self.config.data.augmentation)).encode()).hexdigest()[:8]
        version = Version(
            title=title,
            sha256=sample_digest(data.dataset),
            train=len(data.dataset.train),
            test=len(data.dataset.test),
            form=form,
        )
        folder = state_folder(self.node.state_dir, "", simulated=False)
        if before := note(folder, version):
            log(WARNING, "%s", changed_text(before, version))

    def properties(self) -> dict[str, ConfigRecordValues]:
        """Return the node's answer to the handshake; label counts only in a simulation, which has no private data.

        With secure sums the answer of a deployed node does not depend on the number of its samples, or of their groups.
        """
        sizes = self.simulated or not self.config.secagg.enabled
        data = self.data(divided=sizes)
        if self.node.has_local_data and not self.simulated:
            self._note_version(data)
        properties: dict[str, ConfigRecordValues] = {
            "partition": self.partition,
            "num-nodes": self.num_nodes,
            "clients": self.clients,
            "owners-data": self.has_owners_data,
            "device": str(self.device),
            "versions": [f"{name} {version}" for name, version in shared_versions().items()],
            **data_properties(data, self.clients, simulated=self.simulated, sizes=sizes),
        }
        if needs_files(self.config.target):
            # Raises if the network does not fit.
            build_target(self.config.target, data.dataset.input_shape, data.dataset.num_classes)
            properties["model"] = network_hash(self.config.target, self.config.lpm.weights)
        if self.cross_site:
            properties[CROSS_SITE] = True
        if not self.node.sends_metrics:
            properties[WITHHOLDS_METRICS] = True
        if source := method_hash(self.config.method):
            properties["method"] = source
        if self.simulated:
            properties["threads"] = torch.get_num_threads()
        return properties
