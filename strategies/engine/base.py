"""Base of all strategies: sample clients, build the nodes' messages, reduce their replies."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.node.private_state import INITIAL
from hyperfl_flwr.protocol.arrays import SharedArrays, num_bytes, num_elements, per_client_key, select
from hyperfl_flwr.protocol.messages import (
    ARRAYS,
    CONFIG,
    PER_CLIENT_ARRAYS,
    Reduction,
    Request,
    weights_record,
)
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.protocol.sizes import content_bytes
from hyperfl_flwr.runs.checkpoint import Progress
from hyperfl_flwr.runs.validation import is_over
from hyperfl_flwr.server.exchange import Exchange, match
from hyperfl_flwr.server.handshake import Node
from strategies.engine import sampling
from strategies.engine.advanced import checked
from strategies.engine.client_privacy import applied, are_released, record
from strategies.engine.context import ServerContext
from strategies.engine.forged_replies import with_forgeries
from strategies.engine.hooks import Hooks
from strategies.engine.plain_step import PlainStep, Reduced
from strategies.engine.round_outcome import Outcome, Refused
from strategies.engine.secure_step import SecureStep, secure_step
from strategies.engine.unsent_step import UnsentStep


class BaseStrategy(Hooks, Strategy):
    """Samples clients, sends each node one message, and divides the sums of the replies once.

    A method's strategy defines the initial shared parameters and overrides methods of `Hooks`.

    Args:
        context: The strategy's context.
    """

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.progress = Progress(versions=dict.fromkeys(range(context.config.num_clients), INITIAL))
        self.durable_versions: dict[int, int] = {}
        self.outcome = Outcome()
        self.remembered: SharedArrays = {}
        self.rounding: Mapping[str, int] = {}
        self.remarks: list[str] = []
        self._current: SharedArrays = {}
        self._per_client_sent: Mapping[int, SharedArrays] = {}
        self._step: PlainStep | SecureStep | UnsentStep = UnsentStep("no messages were prepared")
        self._sent: list[Message] = []
        self._sent_clients: list[list[int]] = []

    @abstractmethod
    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the shared groups' initial values: name -> parameters by name."""

    @property
    def sent(self) -> SharedArrays:
        """The shared groups that the clients of this round received, keyed `group/name`."""
        return self._current

    def new_target(self, name: str | None = None) -> Target:
        """Return the target network that the clients train, or that with a name, on the meta device."""
        federation = self.context.federation
        return build_target(
            name or self.context.config.of_client(0).target, federation.input_shape, federation.num_classes
        )

    def evaluated(self, arrays: ArrayRecord, client: int) -> SharedArrays:
        """Return the arrays that a client is sent for the evaluation after the last round, keyed `group/name`.

        Args:
            arrays: The shared groups after that round.
            client: The client's id.
        """
        return {**unpack_arrays(arrays), **self.per_client_arrays([client]).get(client, {})}

    def initial_arrays(self) -> ArrayRecord:
        """Return the shared groups' initial values as a message holds them."""
        return pack_arrays(
            {
                f"{group}/{name}": tensor.numpy()
                for group, tensors in self.initial_parameters().items()
                for name, tensor in tensors.items()
            }
        )

    @property
    def present(self) -> list[int]:
        """Ids of the trained (not novel) clients on nodes that are present, ascending."""
        return [client for client in self.context.federation.clients if client < self.context.config.num_clients]

    def sampled(self, server_round: int) -> Sequence[int]:
        """Return the clients that a round trains, see `strategies.engine.sampling`."""
        return sampling.trained(self.context.config, server_round, self.present)

    def evaluators(self) -> Sequence[int]:
        """Return the clients that evaluate the final global state, see `strategies.engine.sampling`."""
        return sampling.evaluated(self.context.config, self.present)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Sequence[Message]:
        """Return one message for each node that hosts sampled clients, and a separate one for each audited client."""
        self.progress.round = server_round
        self.progress.num_rounds = self.context.config.num_rounds
        self.progress.phase = self.phase(server_round)
        return self._messages(MessageType.TRAIN, arrays, self.sampled(server_round), grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Sequence[Message]:
        """Return one message for each node that hosts clients to evaluate, after the last round.

        Before that, the clients evaluate the received parameters when they are trained in the next round.
        """
        run = self.context.config
        if server_round != run.num_rounds and not is_over(self.progress, run.early_stopping):
            return []
        return self._messages(MessageType.EVALUATE, arrays, self.evaluators(), grid)

    def _messages(self, kind: str, arrays: ArrayRecord, clients: Sequence[int], grid: Grid) -> Sequence[Message]:
        chosen = set(clients)
        self._current, self._per_client_sent = unpack_arrays(arrays), self.per_client_arrays(clients)
        # Masked sums are of integers and need no rounding, so no node learns the largest client's size.
        largest = 1 if self.context.secure else self.context.federation.max_num_examples
        self.rounding = rounding = {"num_clients": len(clients), "max_num_examples": largest}
        requests = [
            (node, self._request(mine, rounding))
            for node in self.context.federation.nodes
            for mine in self._split_audited(kind, [client for client in node.clients if client in chosen])
        ]
        trains = kind == MessageType.TRAIN
        if self.context.secure:
            self._step = secure_step(self.context, grid, self._current, requests, trains=trains)
        else:
            self._step = PlainStep(
                self.context,
                self.progress.round,
                trains=trains,
                received=select(self._current, self.context.reductions, lambda each: each.is_summed),
                per_client=self._sent_alone(clients),
                rounding=rounding,
                num_nodes=len({node.id for node, _ in requests}),
            )
        if isinstance(self._step, UnsentStep):
            requests = []
        self._is_repeated = False
        if trains and requests and are_released(self.context):  # a node that is asked releases its uploads
            record(self.context, self.progress.round, self._step.crowd, num_elements(self._current))
        self._sent_clients = [list(request.clients) for _, request in requests]
        self._sent = [self._message(kind, arrays, node, request) for node, request in requests]
        return self._sent

    def _sent_alone(self, clients: Sequence[int]) -> Mapping[int, SharedArrays]:
        """Return the arrays that each client is sent and sends back alone; empty if there are none."""
        each = select(self._current, self.context.reductions, lambda reduction: reduction is Reduction.EACH)
        if not each:
            return self._per_client_sent
        return {client: {**each, **self._per_client_sent.get(client, {})} for client in clients}

    def record_repetition(self) -> None:
        """Record that clients may upload twice in this round, before a message is sent again.

        With noise of their own, that is a second release. One line suffices for any number of messages, since none is
        sent a third time.
        """
        if are_released(self.context) and not self._is_repeated:
            record(self.context, self.progress.round, self._step.crowd, num_elements(self._current))
        self._is_repeated = True

    def _request(self, clients: list[int], rounding: Mapping[str, int]) -> Request:
        return Request(
            round=self.progress.round,
            experiment=self.context.experiment,
            run_directory=self.context.run_directory,
            clients=clients,
            versions=[self.progress.versions[client] for client in clients],
            kept_versions=[self.durable_versions.get(client, INITIAL) for client in clients],
            **rounding,
        )

    def _message(self, kind: str, arrays: ArrayRecord, node: Node, request: Request) -> Message:
        content = RecordDict({ARRAYS: arrays, CONFIG: request.to_record(), **self._step.records()})
        if self._per_client_sent:
            per_client = {
                per_client_key(client, key): value
                for client in request.clients
                for key, value in self._per_client_sent[client].items()
            }
            content[PER_CLIENT_ARRAYS] = pack_arrays(per_client)
        return Message(content, dst_node_id=node.id, message_type=kind)

    def _split_audited(self, kind: str, clients: list[int]) -> list[list[int]]:
        """Divide a node's clients into messages: each audited client alone, so that its upload is not summed."""
        alone = [client for client in clients if kind == MessageType.TRAIN and self._is_audited(client)]
        rest = [client for client in clients if client not in alone]
        return [*([client] for client in alone), *([rest] if rest else [])]

    def _is_audited(self, client: int) -> bool:
        return self.context.config.audit.covers(client, self.progress.round)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Reduce the nodes' sums, see `reduce`."""
        return self.reduce(match(self._sent, replies))

    def reduce(self, exchanges: Iterable[Exchange]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the nodes' sums and divide once; the result is bitwise independent of which node hosts which client.

        An invalid reply is left out and recorded in `outcome.refused`. If `exchanges` is lazy, only one reply is in
        memory at a time; arrays of single clients are held until all replies have arrived.

        Returns:
            The shared parameters of `advance` (None: unchanged) and the weights of the finished clients (None: none).
        """
        reduced = self._take(exchanges)
        num_clients = len(self.outcome.finished)
        self.progress.trainings += num_clients + self.outcome.num_failures
        self.progress.failed_trainings += self.outcome.num_failures
        self.progress.failed_rounds = 0 if num_clients else self.progress.failed_rounds + 1
        largest = max(map(num_bytes, reduced.per_client.values()), default=0)
        self.outcome.bytes_up = num_bytes(reduced.means) + largest
        if reduced.per_client:
            self.update(reduced.per_client, {result.client: result.num_examples for result in self.outcome.results})
        for client in self.outcome.finished:
            self.progress.versions[client] = self.progress.round
        means = applied(self.context, self._current, reduced.means)
        means = means if num_clients else {}
        advanced = checked(self.advance(dict(means)), means, self._current, type(self))
        unsummed = select(self._current, self.context.reductions, lambda each: not each.is_summed)
        arrays = pack_arrays({**unsummed, **advanced}) if num_clients or advanced else None
        return arrays, weights_record(reduced.num_examples, num_clients) if num_clients else None

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Collect the clients' evaluations, see `collect`."""
        num_examples = self.collect(match(self._sent, replies))
        return weights_record(num_examples, len(self.outcome.finished))

    def collect(self, exchanges: Iterable[Exchange]) -> int:
        """Record the clients' metrics of an evaluation in `outcome`; returns their number of samples, if known."""
        return self._take(exchanges).num_examples

    def _take(self, exchanges: Iterable[Exchange]) -> Reduced:
        """Add all replies of a step, and record what became of each."""
        self._begin_outcome()
        nodes = {node.id: node for node in self.context.federation.nodes}
        sent_clients = iter(self._sent_clients)
        for answer in with_forgeries(self.context, self._sent, exchanges):
            clients = next(sent_clients)
            if (content := self._content(answer, clients)) is not None:
                try:
                    self._step.add(nodes[answer.node], content, clients, self.outcome, is_deployed=answer.is_deployed)
                except ValueError as error:
                    self._record_refusal(answer, clients, str(error))
            del answer, content  # frees its arrays before the next reply is read
        return self._step.close(self.outcome)

    def _begin_outcome(self) -> None:
        present = set(self.present)
        self.outcome = Outcome(
            absent=[client for client in range(self.context.config.num_clients) if client not in present],
            bytes_down=num_bytes(self._current) + max(map(num_bytes, self._per_client_sent.values()), default=0),
            bytes_on_wire=content_bytes(message.content for message in self._sent),
        )

    def _content(self, answer: Exchange, clients: list[int]) -> RecordDict | None:
        """Return a reply's content and count its bytes; without content, record the reason and return None."""
        if answer.away:
            self.outcome.add_away(answer.node, clients)
        elif answer.content is None:
            self._record_refusal(answer, clients, answer.problem, is_refused=answer.refused)
        else:
            self.outcome.bytes_on_wire += content_bytes([answer.content])
        return answer.content

    def _record_refusal(self, answer: Exchange, clients: list[int], problem: str, *, is_refused: bool = True) -> None:
        """Record that all clients of a reply are left out; `is_refused` if the reply itself is invalid."""
        self.outcome.fail(clients, f"node {self.context.federation.number_of(answer.node)}: {problem}")
        if is_refused:
            self.outcome.refuse(answer.node, Refused.of(answer, clients, problem))

    def summary(self) -> None:
        """Print nothing: manifest.json holds all settings."""
