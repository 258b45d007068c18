"""A node that joins a finished run of a server's hypernetwork: it trains the models that it receives on labelled data.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021: a new client under a
fixed hypernetwork. The server trains an embedding for the client and keeps it, as it keeps the hypernetwork. The client
receives a generated model in each step, and returns its change as pFedHN's clients do. After the last step it keeps the
trained model. Its accuracies stay on the node.

::

    joining.json        score of the first model; deleted after the last step
    privacy.jsonl       what the uploads spend, in a simulation; a node keeps it in its state folder
    model.safetensors   the model; model.json describes it, use_model.py uses it
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, ConfigRecordValues, Message, RecordDict

from clients.engine.context import ClientContext
from clients.engine.node_checks import NodeChecks
from clients.novel.labelled import labelled_data
from clients.novel.node import budget_of_node, check_body
from clients.pfedhn import PFedHNClient
from hyperfl_flwr.config.joining import joining_config
from hyperfl_flwr.config.node_config import JOIN_DATA, NOVEL_OUTPUT, NodeConfig
from hyperfl_flwr.core.arithmetic import set_arithmetic
from hyperfl_flwr.core.device import resolve_device
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.data.grouped_split import AUTO
from hyperfl_flwr.data.sample_format import title_of
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.models.standalone import FACTS, PARAMETERS, SCRIPT, STEM, source_folder, write_model
from hyperfl_flwr.node.cohort import failure_of
from hyperfl_flwr.node.private_state import INITIAL, PrivateState
from hyperfl_flwr.node.received_models import ReceivedModels
from hyperfl_flwr.privacy.budget import PrivacyBudget
from hyperfl_flwr.protocol.arrays import SharedArrays, by_number, diverged, layout_problem, not_finite, per_client_key
from hyperfl_flwr.protocol.messages import (
    CLIENTS,
    PER_CLIENT_ARRAYS,
    PROPERTIES,
    ClientResult,
    Report,
    record_of,
)
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.protocol.queries import JOIN, JOINS, NOVEL, RECIPE, JoiningStep

BEGUN = "joining.json"
"""Name of the file with the score of the first model, in the output folder."""

JOINED = "joined"
"""The `state` of a joined client's model in its description."""


@dataclass(frozen=True, kw_only=True)
class JoiningNode:
    """A node with one client that joins a finished run.

    Attributes:
        node: The owner's settings.
        data: The client's labelled data, `npz:FILE`, `csv:FILE` or `folder:PATH`.
        output: Folder of the client's model.
    """

    node: NodeConfig
    data: str
    output: Path

    @classmethod
    def of(cls, node: NodeConfig) -> "JoiningNode | None":
        """Return the joining node of a node config; None if the config has no data to join with.

        Raises:
            ConfigError: If the folder of the results is missing.
        """
        if not node.join_data:
            return None
        if not node.novel_output:
            raise ConfigError(f"{JOIN_DATA} needs {NOVEL_OUTPUT}, the folder of the results, in the node config")
        return cls(node=node, data=node.join_data, output=Path(node.novel_output))

    @property
    def client(self) -> int:
        """The node's number, which is also the id of its only client."""
        return self.node.partition_id or 0

    def handshake_reply(self, message: Message) -> Message:
        """Answer the handshake; the server serves the joining nodes that are online."""
        properties: dict[str, ConfigRecordValues] = {
            NOVEL: True,
            JOINS: True,
            "partition": self.client,
            "num-nodes": (self.node.num_partitions or 1) if self.node.simulated else 1,
            "clients": [self.client],
        }
        return Message(RecordDict({PROPERTIES: ConfigRecord(properties)}), reply_to=message)

    def answer(self, message: Message, checks: NodeChecks) -> Message:
        """Answer a JOIN message with a report and, except in the last step, the change of the received model.

        Args:
            message: The message.
            checks: The checks of the node's owner.
        """
        content = RecordDict()
        try:
            change, num_examples = self._train(message.content, checks)
            if change:
                content[PER_CLIENT_ARRAYS] = pack_arrays(
                    {per_client_key(self.client, key): value for key, value in change.items()}
                )
            result = ClientResult(client=self.client, num_examples=num_examples, metrics={})
            report = Report(results=[result], process=JOIN)
        except Exception as error:  # noqa: BLE001 - any error could reveal data: `failure_of` limits what is sent
            failure = failure_of(self.client, error, send_details=self.node.simulated)
            report = Report(failures=[failure], process=JOIN)
        content[CLIENTS] = report.to_record()
        return Message(content, reply_to=message)

    def _train(self, content: RecordDict, checks: NodeChecks) -> tuple[SharedArrays, int]:
        """Train the received model; returns its change, and the number of training samples."""
        refuse_unjoined_model(self.output)
        step = JoiningStep.of(content)
        recipe = TargetRecipe.of(dict(record_of(content, RECIPE, ConfigRecord)))
        received = by_number(unpack_arrays(record_of(content, PER_CLIENT_ARRAYS, ArrayRecord)))
        if set(received) != {self.client}:
            raise ValueError(f"the message has models for the clients {sorted(received)}, this is client {self.client}")
        member = self._member(step, recipe, checks)
        member.require_size(scores=False)
        if step.number == 1 and ReceivedModels(member.context.state).forget():  # of a join that was given up
            checks.note(
                f"round 1: client {self.client}: the join begins again, so what it receives is not compared with what "
                f"it has received before. If nobody has begun it again, ask the operator why"
            )
        arrays = received[self.client]
        if problem := layout_problem(*(dict.fromkeys(keys, np.zeros(0)) for keys in (member.keys(), arrays))):
            raise ValueError(problem)
        versions = {"round": step.number, "version": INITIAL, "kept-version": INITIAL}
        change, num_examples, metrics = member.fit([arrays[key] for key in member.keys()], versions)  # noqa: SIM118
        named = dict(zip(member.keys(), change, strict=True))
        if key := not_finite(named):
            raise diverged(key)
        self.output.mkdir(mode=0o700, parents=True, exist_ok=True)
        if step.number == 1:
            score = TASKS[recipe.task].score
            facts = {f"{score}_before": metrics[f"aggregate-{score}"]}
            write_atomically(self.output / BEGUN, json.dumps(facts).encode(), mode=0o600)
        if not step.is_last:
            return named, num_examples
        self._keep(member, recipe, step, num_examples, metrics)
        return {}, num_examples

    def _keep(
        self,
        member: PFedHNClient,
        recipe: TargetRecipe,
        step: JoiningStep,
        num_examples: int,
        metrics: Mapping[str, Any],
    ) -> None:
        """Write the model after the last step, and forget what was only for the steps before.

        Args:
            member: The client, with the trained model.
            recipe: Network, input and classes of the model.
            step: The last step.
            num_examples: Number of training samples.
            metrics: What the client has measured in this step.
        """
        begun, score = self.output / BEGUN, TASKS[recipe.task].score
        about: dict[str, Any] = {
            "state": JOINED,
            "method": member.context.config.method,
            "dataset": title_of(self.data),
            **json.loads(begun.read_text()),
            f"{score}_generated": metrics[f"aggregate-{score}"],
            score: metrics[f"personalized-{score}"],
            "train_examples": num_examples,
            "test_examples": int(metrics["test-examples"]),
            "rounds": step.number - 1,
        }
        write_model(self.output, member.target_state(), recipe, about)
        begun.unlink()
        ReceivedModels(member.context.state).forget()

    def _member(self, step: JoiningStep, recipe: TargetRecipe, checks: NodeChecks) -> PFedHNClient:
        """Return the client; the server can set its local training, but no path."""
        config = joining_config(json.loads(step.settings))
        # A run's trained clients have numbers below num-clients.
        config = config.model_copy(update={"target": recipe.target, "num_clients": self.client + 1})
        if not self.node.simulated:
            config.weighting.refuse_isolation()
        check_body(self.node, recipe)
        device = resolve_device(self.node.device)
        set_arithmetic(config.precision, deterministic=config.deterministic, device=device)
        return PFedHNClient(
            ClientContext(
                config=config,
                client=self.client,
                data=labelled_data(self.data, recipe, self.node.group_by or AUTO, config.weighting).to(device),
                device=device,
                state=PrivateState(self.output, JOIN, self.client),  # the clients of pFedHN store nothing
                mean=recipe.mean,
                std=recipe.std,
                round=step.number,
                classes=recipe.classes,
                target_mean=recipe.target_mean,
                target_std=recipe.target_std,
                features=recipe.features,
                checks=checks,
                budget=self._budget(step),
            )
        )

    def _budget(self, step: JoiningStep) -> PrivacyBudget | None:
        """Return the record of what the step spends; None after the last one, of which no arrays are sent.

        Not with `max-epsilon`: whether such a training ends in finite numbers is an answer, too, and the server says
        which step is the last one.
        """
        return None if step.is_last and self.node.max_epsilon is None else budget_of_node(self.node, JOIN)


def refuse_unjoined_model(output: Path) -> None:
    """Check that a folder has no model but one of a client that has joined, which the next join replaces.

    Raises:
        RunDirectoryError: If the folder has a model of another command.
    """
    found = [name for name in (PARAMETERS, FACTS, SCRIPT, source_folder(STEM)) if (output / name).exists()]
    if not found or (output / BEGUN).exists():
        return
    try:
        facts = json.loads((output / FACTS).read_text())
    except (OSError, ValueError):
        facts = None
    if not isinstance(facts, dict) or facts.get("state") != JOINED:
        raise RunDirectoryError(
            f"{NOVEL_OUTPUT} = {output} holds {', '.join(found)} of another command, which would be replaced; choose "
            f"another folder"
        )
