"""Client app that records every incoming and outgoing message in the node's ledger before processing or sending it."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from logging import ERROR

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from hyperfl_flwr.core.errors import for_others
from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.flower.log import log
from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.node.ledger import Ledger, LedgerEntry, LedgerError, Origin
from hyperfl_flwr.protocol.messages import HELLO, OUTLIER_SUMS, PER_CLIENT_ARRAYS, group_of
from hyperfl_flwr.protocol.packing import unreadable_records
from hyperfl_flwr.protocol.secure_sums.messages import UNMASK, unmasked_parts

NOT_RECORDED = "the node's ledger cannot be written, so nothing else leaves it; its log says why"
"""The only text that a node sends without a ledger entry."""


@dataclass(frozen=True, kw_only=True)
class LedgerHandle:
    """Settings of the recording of a node's messages.

    Attributes:
        method: The run's method.
        ledger: The ledger to append to.
        private: Groups of parameters that must not leave the node; None if they are not known.
        send_details: True if full messages of exceptions may leave the node; else only the result of `for_others`.
        sums_only: True if only masked sums, shares and the handshake may leave the node.
    """

    method: str
    ledger: Ledger
    private: Collection[str] | None
    send_details: bool
    sums_only: bool = False


class LedgerApp(ClientApp):
    """Flower client app with a ledger.

    Flower serialises the return value of `__call__` and adds nothing, so the recorded reply is what leaves the node.

    Args:
        ledger_for: Function that returns the recording settings of a node; None to record nothing.
    """

    def __init__(self, ledger_for: Callable[[Message, Context], LedgerHandle | None]) -> None:
        super().__init__()
        self._ledger_for = ledger_for

    def __call__(self, message: Message, context: Context) -> Message:
        """Process a message and return the reply; a reply without a ledger entry is not sent."""
        handle = self._ledger_for(message, context)
        if handle is None:
            return super().__call__(message, context)
        origin = _origin(message, context, handle)
        try:
            handle.ledger.append(origin.entry("in", message.content))
            reply = self._answer(message, context, handle)
            entry = _leaving(origin, reply)
            # Before the entry is written: the ledger must record what really leaves.
            for what, names in _must_not_leave(entry, reply, handle):
                if names:
                    log(ERROR, "the reply contains %s, so it is not sent: %s", what, ", ".join(names))
                    reply = _error(message, f"ValueError: the reply contains {what}")
                    entry = _leaving(origin, reply)
                    break
            handle.ledger.append(entry)
        except LedgerError as error:
            log(ERROR, "%s", error)
            return _error(message, f"{type(error).__name__}: {NOT_RECORDED}")
        return reply

    def _answer(self, message: Message, context: Context, handle: LedgerHandle) -> Message:
        """Process a message; converts an exception to an error reply, so that its text can be checked and recorded."""
        try:
            return super().__call__(message, context)
        except LedgerError:
            raise
        except Exception as error:  # noqa: BLE001 - Flower would send the full text of any exception
            log(ERROR, "the node could not process a message of type %s", message.metadata.message_type, exc_info=error)
            return _error(message, f"{type(error).__name__}: {error}" if handle.send_details else for_others(error))


def finding_recorder(handle: LedgerHandle | None, message: Message, context: Context) -> Callable[[str], None]:
    """Return a function that records what a check of the node's owner has found in a message.

    Args:
        handle: Settings of the recording; None to record nothing.
        message: The message.
        context: The node's context.
    """
    if handle is None:
        return lambda _: None
    origin, ledger = _origin(message, context, handle), handle.ledger
    return lambda finding: ledger.append(origin.entry("check", None, finding=finding))


def _must_not_leave(entry: LedgerEntry, reply: Message, handle: LedgerHandle) -> Iterator[tuple[str, list[str]]]:
    """Yield the kinds of what a reply must not contain, each with the names of what it contains."""
    if reply.has_content():
        yield "arrays that cannot be read", unreadable_records(reply.content)  # their names would be unknown
        yield "arrays of private groups", private_arrays(entry, handle.private or ())
        yield "more than a secure sum", _unmasked(entry.kind, reply.content, sums_only=handle.sums_only)


def private_arrays(entry: LedgerEntry, private: Collection[str]) -> list[str]:
    """Return the names of a message's arrays that belong to one of the private groups, wherever their key has it."""
    names = [array.name for record in entry.records for array in record.arrays]
    return [name for name in names if not set(private).isdisjoint(name.split("/")[:-1])]


def _unmasked(kind: str, content: RecordDict, *, sums_only: bool) -> list[str]:
    """Return what a reply must not contain; a reply to UNMASK has only shares, whatever the settings say."""
    return unmasked_parts(kind, content) if kind == UNMASK or (sums_only and kind != HELLO) else []


def array_group(record: str, name: str) -> str:
    """Return the group of an array; in some records the key begins with a client id or a level."""
    return group_of(name.partition("/")[2] if record in (PER_CLIENT_ARRAYS, OUTLIER_SUMS) else name)


def _origin(message: Message, context: Context, handle: LedgerHandle) -> Origin:
    number = context.node_config.get("partition-id", -1)
    return Origin(
        kind=message.metadata.message_type,
        flower_run=message.metadata.run_id,
        node=number if isinstance(number, int) else -1,
        method=handle.method,
        private=sorted(handle.private) if is_user_code(handle.method) and handle.private is not None else None,
        request=message.content,
    )


def _leaving(origin: Origin, reply: Message) -> LedgerEntry:
    if reply.has_error():
        return origin.entry("out", None, str(reply.error.reason))
    return origin.entry("out", reply.content)


def _error(message: Message, reason: str) -> Message:
    """Return an error reply in the form that Flower uses for exceptions."""
    return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)
