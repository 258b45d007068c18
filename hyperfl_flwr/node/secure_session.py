"""A node's memory of secure sums: its key of each session, and what it has done in the session's newest step.

Flower starts a process for every message, and a server may send a message twice, or two at once. The rules against a
malicious server need a memory that survives both: one header in a step, few uploads, and one answer to UNMASK. Each
session has a folder `secagg/SESSION` in the node's state folder, with `key.json` and `step.json`. A change is on disk
before the reply that it belongs to leaves the node. A state folder that is restored from a copy forgets what came after
it.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from hyperfl_flwr.core.errors import RefusalError, StateError
from hyperfl_flwr.core.files.atomic_files import unwritable, write_atomically
from hyperfl_flwr.core.files.folder_lock import wait_for_folder
from hyperfl_flwr.protocol.secure_sums.keys import simulated_key
from hyperfl_flwr.protocol.secure_sums.masks import Step

MOST_UPLOADS = 3
"""Number of uploads of a node in one step: a message whose reply is lost may be sent again, but not without end."""

FOLDER = "secagg"
"""Folder of all sessions in a node's state folder."""

DAYS = 30
"""Days after which an unused session is removed, key and step together."""

_KEY, _STEP = "key.json", "step.json"
_REMOVED = ".removed-"


class Sessions(Protocol):
    """Interface: the keys and the memory of a node."""

    def begin(self, session: str) -> X25519PrivateKey:
        """Return the key of a session, which is made at the first handshake.

        Raises:
            StateError: If it cannot be written or read.
        """

    def key(self, session: str) -> X25519PrivateKey:
        """Return the key of a session.

        Raises:
            RefusalError: If there is none.
            StateError: If it is damaged.
        """

    def accept(self, step: Step) -> None:
        """Record that this node takes part in a step.

        Raises:
            RefusalError: If it must not: it has taken part in a later one, in this one with other contents, or often.
            StateError: If it cannot be recorded.
        """

    def add_upload(self, step: Step, upload: bytes) -> None:
        """Record the identity of an upload, before it leaves; raises as `accept`."""

    def answer(self, step: Step, upload: bytes, question: bytes) -> None:
        """Record the question of a step that this node answers, before the answer leaves.

        Args:
            step: The step.
            upload: Identity of this node's upload in the question.
            question: Digest of the question.

        Raises:
            RefusalError: If the node has not made this upload in its newest step, or has answered another question.
            StateError: If it cannot be recorded.
        """


@dataclass(frozen=True, kw_only=True)
class SimulatedSessions:
    """Sessions of a simulated node, which hides nothing: a derived key, and no memory.

    Attributes:
        partition: Number of the node.
    """

    partition: int

    def begin(self, session: str) -> X25519PrivateKey:
        """Return the derived key; see `Sessions`."""
        return simulated_key(session, self.partition)

    def key(self, session: str) -> X25519PrivateKey:
        """Return the derived key; see `Sessions`."""
        return simulated_key(session, self.partition)

    def accept(self, step: Step) -> None:
        """Accept any step."""

    def add_upload(self, step: Step, upload: bytes) -> None:
        """Accept any upload."""

    def answer(self, step: Step, upload: bytes, question: bytes) -> None:
        """Accept any question."""


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """Content of `step.json`.

    Attributes:
        step: Position of the newest step in the session.
        transcript: Its transcript T, hexadecimal.
        uploads: Identities of the node's uploads, hexadecimal.
        question: Digest of the question that was answered, hexadecimal; empty before.
    """

    step: int = 0
    transcript: str = ""
    uploads: tuple[str, ...] = ()
    question: str = ""


@dataclass(frozen=True, kw_only=True)
class StoredSessions:
    """Sessions of a deployed node, on its disk; several processes may use them at once.

    Attributes:
        folder: The folder of all sessions; created if missing, with access for its owner only.
    """

    folder: Path

    def begin(self, session: str) -> X25519PrivateKey:
        """Return the key of a session, which the first process makes; see `Sessions`."""
        folder = self.folder / session
        with self._locked(create=True):
            folder.mkdir(mode=0o700, exist_ok=True)
            os.utime(folder)
            self._remove_old()
            if not (folder / _KEY).exists():
                private = X25519PrivateKey.generate().private_bytes_raw().hex()
                write_atomically(folder / _KEY, json.dumps({"private": private}).encode(), mode=0o600)
            return self.key(session)

    def key(self, session: str) -> X25519PrivateKey:
        """Return the stored key; see `Sessions`."""
        path = self.folder / session / _KEY
        try:
            return X25519PrivateKey.from_private_bytes(bytes.fromhex(json.loads(path.read_bytes())["private"]))
        except FileNotFoundError:
            raise RefusalError(
                "this node has no key of the session: it did not take part in the handshake, or its state folder was "
                "removed; start the run again"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error) from None

    def accept(self, step: Step) -> None:
        """Record the step, or that it is the one that is recorded; see `Sessions`."""
        with self._locked():
            memory = self._read(step)
            if memory.step > step.header.step:
                raise _repeated("this node has taken part in a later step of the session")
            if memory.step < step.header.step:
                self._write(step, _Memory(step=step.header.step, transcript=step.transcript.hex()))
            elif memory.transcript != step.transcript.hex():
                raise _repeated("this node has accepted the same step with other contents")
            else:
                _refuse_finished(memory)

    def add_upload(self, step: Step, upload: bytes) -> None:
        """Record the identity of an upload; see `Sessions`."""
        with self._locked():
            memory = self._of(step)
            _refuse_finished(memory)
            self._write(step, replace(memory, uploads=(*memory.uploads, upload.hex())))

    def answer(self, step: Step, upload: bytes, question: bytes) -> None:
        """Record the question, or that it is the one that is recorded; see `Sessions`."""
        with self._locked():
            memory = self._of(step)
            if upload.hex() not in memory.uploads:
                raise _repeated("this node is asked to open an upload that it has not sent")
            if not memory.question:
                self._write(step, replace(memory, question=question.hex()))
            elif memory.question != question.hex():
                raise _repeated("this node has already helped to open the sum of this step with other nodes or uploads")

    def _of(self, step: Step) -> _Memory:
        """Return the memory of the newest step, if it is the given one."""
        memory = self._read(step)
        if memory.transcript != step.transcript.hex():
            raise _repeated("this is not the newest step in which this node has taken part")
        return memory

    def _read(self, step: Step) -> _Memory:
        path = self.folder / step.header.session / _STEP
        try:
            found = json.loads(path.read_bytes())
            return _Memory(**(found | {"uploads": tuple(found["uploads"])}))
        except FileNotFoundError:
            return _Memory()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error) from None

    def _write(self, step: Step, memory: _Memory) -> None:
        path = self.folder / step.header.session / _STEP
        write_atomically(path, json.dumps(asdict(memory)).encode(), mode=0o600)

    @contextlib.contextmanager
    def _locked(self, *, create: bool = False) -> Iterator[None]:
        """Hold the lock of all sessions; converts the errors of the disk."""
        try:
            if create:
                for folder in (self.folder.parent, self.folder):  # mkdir applies `mode` only to the last folder
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with wait_for_folder(self.folder):
                yield
        except OSError as error:
            raise StateError(
                f"the secure session is not stored, so nothing is sent: {unwritable(self.folder, error, 1000)}"
            ) from error

    def _remove_old(self) -> None:
        """Remove sessions that were not used for `DAYS`."""
        oldest = time.time() - DAYS * 24 * 3600
        for folder in [each for each in self.folder.iterdir() if each.is_dir() and each.stat().st_mtime < oldest]:
            # Renamed first: a process that is killed here must not leave a key without its step.
            removed = folder if folder.name.startswith(_REMOVED) else folder.with_name(_REMOVED + folder.name)
            folder.rename(removed)
            shutil.rmtree(removed)


def _refuse_finished(memory: _Memory) -> None:
    """Refuse another upload in a step that has been opened, or has enough of them."""
    if memory.question:
        raise _repeated("this node has already released its shares of this step")
    if len(memory.uploads) >= MOST_UPLOADS:
        raise RefusalError(f"this node has trained {MOST_UPLOADS} times for this step, the most that it allows")


def _repeated(reason: str) -> RefusalError:
    """Return the error for a message that contradicts those before it, for the log of a node's owner."""
    return RefusalError(
        f"{reason}; nothing is sent, since the server has repeated or changed a message: if it has been restarted, "
        f"start the run again"
    )


def _damaged(path: Path, error: Exception) -> StateError:
    return StateError(
        f"{path} is damaged ({type(error).__name__}); remove the folder of this session, and start the run again"
    )
