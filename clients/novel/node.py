"""The node of a novel client: its configuration, and its answers to the server's queries.

Answers hold only a descriptor and a number of samples. Samples, labels and predictions stay in the owner's folders.
"""

from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, ConfigRecordValues, Message, RecordDict

from clients.novel.on_demand import RECORD, NovelOwner, OnDemandClient
from hyperfl_flwr.config.node_config import NOVEL_DATA, NOVEL_OUTPUT, NodeConfig
from hyperfl_flwr.config.pretrained import owners_weights
from hyperfl_flwr.core.device import resolve_device
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.models.model_spec import Recipe, TargetRecipe
from hyperfl_flwr.models.provenance import refuse_other_body, use_weights
from hyperfl_flwr.node.cohort import failure_of
from hyperfl_flwr.node.private_state import state_folder
from hyperfl_flwr.privacy.budget import PrivacyBudget
from hyperfl_flwr.protocol.arrays import by_number, per_client_key
from hyperfl_flwr.protocol.messages import (
    ARRAYS,
    CLIENTS,
    PER_CLIENT_ARRAYS,
    PROPERTIES,
    ClientResult,
    Report,
    record_of,
)
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.protocol.queries import DESCRIBE, NOVEL, PERSONALIZE, RECIPE


@dataclass(frozen=True, kw_only=True)
class NovelNode:
    """A node with one novel client, which requests a model on demand.

    Attributes:
        owner: The owner's settings.
        partition: The node's number, which is also the id of its only client.
        num_nodes: Number of nodes.
        lpm_weights: The owner's weights of pre-trained bodies.
        simulated: Whether the server runs on the same machine, so that it may see details of failures.
    """

    owner: NovelOwner
    partition: int
    num_nodes: int
    lpm_weights: str
    simulated: bool

    @classmethod
    def of(cls, node: NodeConfig) -> "NovelNode | None":
        """Return the novel node of a node config; None if the config is that of a training node.

        Raises:
            ConfigError: If a setting is missing or wrong.
        """
        if not node.novel_data:
            return None
        if not node.novel_output:
            raise ConfigError(f"{NOVEL_DATA} needs {NOVEL_OUTPUT}, the folder of the results, in the node config")
        return cls(
            owner=NovelOwner(
                data=Path(node.novel_data),
                output=Path(node.novel_output),
                epsilon=node.novel_epsilon,
                delta=node.novel_delta,
                device=resolve_device(node.device),
                budget=budget_of_node(node, PERSONALIZE),
                min_samples=node.min_samples,
            ),
            partition=node.partition_id or 0,
            num_nodes=node.num_partitions or 1,
            lpm_weights=node.lpm_weights,
            simulated=node.simulated,
        )

    def handshake_reply(self, message: Message) -> Message:
        """Answer the handshake.

        The number of novel nodes in a deployment is not known in advance: the server serves those that are online.
        """
        properties: dict[str, ConfigRecordValues] = {
            NOVEL: True,
            "partition": self.partition,
            "num-nodes": self.num_nodes if self.simulated else 1,
            "clients": [self.partition],
        }
        return Message(RecordDict({PROPERTIES: ConfigRecord(properties)}), reply_to=message)

    def answer(self, message: Message) -> Message:
        """Answer a DESCRIBE or PERSONALIZE message with a report, and to DESCRIBE with the descriptor."""
        content = RecordDict()
        work = {DESCRIBE: self._describe, PERSONALIZE: self._personalize}[message.metadata.message_type]
        try:
            recipe = Recipe.of(dict(record_of(message.content, RECIPE, ConfigRecord)))
            check_body(self, recipe)
            num_examples = work(OnDemandClient(self.owner, recipe), message, content)
            result = ClientResult(client=self.partition, num_examples=num_examples, metrics={})
            report = Report(results=[result], process=NOVEL)
        except Exception as error:  # noqa: BLE001 - any error could reveal data: `failure_of` limits what is sent
            content = RecordDict()
            failure = failure_of(self.partition, error, send_details=self.simulated)
            report = Report(failures=[failure], process=NOVEL)
        content[CLIENTS] = report.to_record()
        return Message(content, reply_to=message)

    def _describe(self, client: OnDemandClient, message: Message, content: RecordDict) -> int:
        arrays, num_examples = client.describe(unpack_arrays(record_of(message.content, ARRAYS, ArrayRecord)))
        content[PER_CLIENT_ARRAYS] = pack_arrays(
            {per_client_key(self.partition, key): value for key, value in arrays.items()}
        )
        return num_examples

    def _personalize(self, client: OnDemandClient, message: Message, _: RecordDict) -> int:
        per_client = by_number(unpack_arrays(record_of(message.content, PER_CLIENT_ARRAYS, ArrayRecord)))
        if set(per_client) != {self.partition}:
            raise ValueError(
                f"the message has models for the clients {sorted(per_client)}, this is client {self.partition}"
            )
        return client.personalize(per_client[self.partition])


def check_body(node: "NovelNode | NodeConfig", recipe: TargetRecipe) -> None:
    """Use the owner's weights of a pre-trained body, and check that the model was trained with them.

    Raises:
        RefusalError: If the owner of a deployed node has not allowed such bodies.
        ConfigError: If the weights are missing or others.
    """
    if node.lpm_weights or not node.simulated:
        use_weights(node.lpm_weights or owners_weights(recipe.target, simulated=False))
    refuse_other_body(recipe.target, recipe.body)


def budget_of_node(node: NodeConfig, kind: str) -> PrivacyBudget:
    """Return the record of a novel client: in its state folder, or without one in a simulation in its output folder.

    The server's requests belong to no run of the client's: what they spend is counted together.

    Args:
        node: The node's config.
        kind: Type of the requests, which stands for a run.
    """
    in_output = node.simulated and not node.state_dir
    folder = Path(node.novel_output) if in_output else state_folder(node.state_dir, "", simulated=False)
    return PrivacyBudget(
        path=folder / RECORD,
        experiment=kind,
        client=node.partition_id or 0,
        max_epsilon=node.max_epsilon,
        delta=node.max_epsilon_delta,
        is_only_client=node.has_one_client,
    )
