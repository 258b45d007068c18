"""Answer Flower's messages with the NumPyClients of a node."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord, ConfigRecord, ConfigRecordValues, Message, RecordDict

from clients.engine.base import BaseClient
from clients.engine.cross_site import score_models, send_model
from clients.novel.answers import assess, classifier_errors, classifier_gradients
from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.core.process_memory import peak_memory, process_name
from hyperfl_flwr.node.array_sums import PlainSum
from hyperfl_flwr.node.cohort import CohortResult, Received, Trainer, evaluate_cohort, failure_of, train_cohort
from hyperfl_flwr.node.secure_cohort import SecureCohort
from hyperfl_flwr.protocol.arrays import SharedArrays, by_number, not_finite
from hyperfl_flwr.protocol.messages import (
    ARRAYS,
    CLIENTS,
    OUTLIER_SUMS,
    PER_CLIENT_ARRAYS,
    PROPERTIES,
    WEIGHTS,
    ClientResult,
    Reduction,
    Report,
    Request,
    group_of,
    record_of,
    weights_record,
)
from hyperfl_flwr.protocol.packing import pack_arrays, pack_by_number, unpack_arrays
from hyperfl_flwr.protocol.queries import ASSESS, DESCRIBE, ERRORS, GRADIENTS, SCORE_MODELS, SEND_MODEL, QuerySpec


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The clients of one node.

    Attributes:
        make_client: Function that builds the client with an id.
        trainer: Trainer of the clients in a message.
        reductions: Reduction of each shared group.
        send_details: Whether the text and traceback of a failure are sent to the server.
        sends_metrics: Whether replies hold the clients' metrics; `secure` decides for itself.
        secure: The node's side of secure sums; None if the server sees each node's sums.
        cross_site: Whether the clients' models may be sent, and models of others evaluated.
    """

    make_client: Callable[[int], BaseClient]
    trainer: Trainer
    reductions: Mapping[str, Reduction]
    send_details: bool
    sends_metrics: bool = True
    secure: SecureCohort | None = None
    cross_site: bool = False


def train(cohort: Cohort, message: Message) -> Message:
    """Answer a TRAIN message with the shared arrays or their sums, the weights, and a report; or with masked sums."""
    began = time.perf_counter()
    received, request = _received(message, cohort.reductions), Request.of(message.content)
    if cohort.secure:
        return Message(cohort.secure.train(cohort.trainer, message.content, received), reply_to=message)
    total = PlainSum(received.shared, cohort.reductions, request)
    result = train_cohort(cohort.trainer, request, received, total, send_details=cohort.send_details)
    content = RecordDict(
        {
            ARRAYS: pack_arrays(total.arrays),
            WEIGHTS: weights_record(result.num_examples, len(result.results)),
            CLIENTS: _report(result, began, sends_metrics=cohort.sends_metrics).to_record(),
        }
    )
    if outliers := total.outliers:
        content[OUTLIER_SUMS] = pack_by_number(outliers)
    if result.per_client:
        content[PER_CLIENT_ARRAYS] = pack_by_number(result.per_client)
    return Message(content, reply_to=message)


def evaluate(cohort: Cohort, message: Message) -> Message:
    """Answer an EVALUATE message with a report, or with masked sums."""
    began = time.perf_counter()
    received, request = _received(message, cohort.reductions), Request.of(message.content)
    if cohort.secure:
        return Message(cohort.secure.evaluate(cohort.make_client, message.content, received), reply_to=message)
    result = evaluate_cohort(cohort.make_client, request, received, send_details=cohort.send_details)
    report = _report(result, began, sends_metrics=cohort.sends_metrics)
    return Message(RecordDict({CLIENTS: report.to_record()}), reply_to=message)


def answer(cohort: Cohort, message: Message) -> Message:
    """Answer a query about clients' data with arrays of each client and a report.

    Raises:
        RefusalError: If the query belongs to a cross-site matrix, and the run or the node's owner does not have one.
    """
    began = time.perf_counter()
    if message.metadata.message_type in (SEND_MODEL, SCORE_MODELS) and not cohort.cross_site:
        raise RefusalError(
            "models are exchanged only in runs with cross-site = true, by nodes whose owner has set cross-site = true, "
            "both from the run's first message on"
        )
    received, request, question = _received(message, {}), Request.of(message.content), QuerySpec.of(message.content)
    work = _WORK[message.metadata.message_type]
    result = CohortResult()
    for client in request.clients:
        try:
            arrays, num_examples = work(cohort.make_client(client), received.of(client), question)
            if key := not_finite(arrays):
                raise FloatingPointError(f"{key} is not finite")
        except Exception as error:  # noqa: BLE001 - a failing client must not stop its neighbours
            result.failures.append(failure_of(client, error, send_details=cohort.send_details))
            continue
        result.per_client[client] = arrays
        result.results.append(ClientResult(client=client, num_examples=num_examples, metrics={}))
    content = RecordDict({CLIENTS: _report(result, began).to_record()})
    if result.per_client:
        content[PER_CLIENT_ARRAYS] = pack_by_number(result.per_client)
    return Message(content, reply_to=message)


_WORK: Mapping[str, Callable[[BaseClient, SharedArrays, QuerySpec], tuple[SharedArrays, int]]] = {
    DESCRIBE: lambda member, received, question: member.describe(received, question),
    ASSESS: assess,
    GRADIENTS: classifier_gradients,
    ERRORS: classifier_errors,
    SEND_MODEL: send_model,
    SCORE_MODELS: score_models,
}
"""Functions that answer the queries for one client, by message type."""


def handshake_reply(message: Message, properties: Mapping[str, ConfigRecordValues]) -> Message:
    """Answer the handshake with a node's properties."""
    return Message(RecordDict({PROPERTIES: ConfigRecord(dict(properties))}), reply_to=message)


def _received(message: Message, reductions: Mapping[str, Reduction]) -> Received:
    arrays = unpack_arrays(record_of(message.content, ARRAYS, ArrayRecord))
    each, down = (
        {key: value for key, value in arrays.items() if reductions.get(group_of(key)) is reduction}
        for reduction in (Reduction.EACH, Reduction.DOWN)
    )
    shared = {key: value for key, value in arrays.items() if key not in each and key not in down}
    per_client: Mapping[int, SharedArrays] = {}
    if PER_CLIENT_ARRAYS in message.content:
        per_client = by_number(unpack_arrays(record_of(message.content, PER_CLIENT_ARRAYS, ArrayRecord)))
    return Received(shared=shared, per_client=per_client, each=each, down=down)


def _report(result: CohortResult, began: float, *, sends_metrics: bool = True) -> Report:
    return Report(
        results=result.results if sends_metrics else [replace(each, metrics={}) for each in result.results],
        failures=result.failures,
        process=process_name(),
        peak_memory=peak_memory(),
        seconds=time.perf_counter() - began,
    )
