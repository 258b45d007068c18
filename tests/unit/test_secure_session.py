"""A node's memory of secure sums holds against several processes at once, kills, damage and time."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.common.serde import recorddict_to_proto
from secure_steps import SESSION, accept, header_for, nodes_in, question_for, released, rows_of, uploaded

from hyperfl_flwr.core.errors import RefusalError, StateError
from hyperfl_flwr.node.secure_session import DAYS, MOST_UPLOADS, StoredSessions
from hyperfl_flwr.node.secure_sums import SecureNode
from hyperfl_flwr.protocol.secure_sums.keys import public_of

PROCESS = """
import os, signal, sys
from pathlib import Path
from flwr.common.serde import recorddict_from_proto
from flwr.proto.recorddict_pb2 import RecordDict
from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.node import secure_sums
from hyperfl_flwr.node.secure_session import StoredSessions
from hyperfl_flwr.protocol.secure_sums.keys import public_of

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

kind, folder, path = sys.argv[1:]
sessions = StoredSessions(folder=Path(folder))
print("ready", flush=True)
sys.stdin.readline()
if kind == "handshake":
    print(public_of(sessions.begin(path)))
else:
    if kind == "die":
        secure_sums.release = die  # the next call after the question is stored
    content = recorddict_from_proto(RecordDict.FromString(Path(path).read_bytes()))
    try:
        secure_sums.release_shares(sessions, 0, content)
        print("answered")
    except RefusalError as error:
        print(error)
"""


def started(kind: str, folder: Path, path: str | Path) -> subprocess.Popen[str]:
    """Return a process that is ready to answer for node 0; it waits for a line."""
    words = [sys.executable, "-c", PROCESS, kind, str(folder), str(path)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def answers_of(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Let processes continue at once, and return what they say."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [process.communicate()[0].strip() for process in processes]


def folder_of(node: SecureNode) -> Path:
    assert isinstance(node.sessions, StoredSessions)
    return node.sessions.folder


def test_two_processes_answer_one_question(tmp_path: Path) -> None:
    """Flower starts a process for each message: of two questions at once, exactly one is answered."""
    nodes = nodes_in(tmp_path, 5)
    header = header_for(nodes, threshold=4)
    uploads = {node.partition: uploaded(node, header) for node in nodes}
    running = []
    for gone in (None, 3):
        told = {number: upload for number, upload in uploads.items() if number != gone}
        path = tmp_path / f"question-{gone}"
        path.write_bytes(recorddict_to_proto(question_for(header, nodes[0], told)).SerializeToString())
        running.append(started("answer", folder_of(nodes[0]), path))
    texts = answers_of(running)
    answered, refused = sorted(texts)
    assert answered == "answered"
    assert refused.startswith("this node has already helped to open the sum of this step with other nodes or uploads")


def test_several_handshakes_make_one_key(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "secagg"
    assert len(set(answers_of([started("handshake", folder, SESSION) for _ in range(3)]))) == 1
    path = folder / SESSION / "key.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parents[:3]} == {0o700}


def test_a_node_that_is_killed_after_it_has_stored_a_question_answers_no_other(tmp_path: Path) -> None:
    nodes = nodes_in(tmp_path, 5)
    header = header_for(nodes, threshold=4)
    uploads = {node.partition: uploaded(node, header) for node in nodes}
    question, path = question_for(header, nodes[0], uploads), tmp_path / "question"
    path.write_bytes(recorddict_to_proto(question).SerializeToString())
    process = started("die", folder_of(nodes[0]), path)
    assert answers_of([process]) == [""]
    assert process.returncode == -signal.SIGKILL
    del uploads[3]
    with pytest.raises(RefusalError, match="already helped to open the sum"):
        released(nodes[0], question_for(header, nodes[0], uploads))
    released(nodes[0], question)


def test_what_a_killed_node_has_accepted_is_remembered(tmp_path: Path) -> None:
    """The step is on disk before the training, and the upload's identity before the reply."""
    nodes = nodes_in(tmp_path, 5)
    header = header_for(nodes)
    accept(nodes[0], header)
    again = nodes_in(tmp_path, 5)[0]
    with pytest.raises(RefusalError, match="with other contents"):
        accept(again, replace(header, threshold=4))
    upload = uploaded(again, header)
    memory = json.loads((folder_of(again) / SESSION / "step.json").read_text())
    assert (memory["step"], memory["uploads"]) == (2, [upload.id.hex()])
    assert stat.S_IMODE((folder_of(again) / SESSION / "step.json").stat().st_mode) == 0o600


def test_nothing_is_trained_or_sent_after_the_last_upload_that_a_step_allows(tmp_path: Path) -> None:
    """Flower may start two processes for one message: the second is refused, too, if it has begun before the first."""
    nodes = nodes_in(tmp_path, 5)
    header = header_for(nodes, threshold=4)
    opened, often = nodes[0], nodes[1]
    uploads = {node.partition: uploaded(node, header) for node in nodes}
    step = accept(opened, header)
    released(opened, question_for(header, opened, uploads))
    for _ in range(MOST_UPLOADS - 1):
        uploaded(often, header)
    for node, reason in ((opened, "has already released its shares"), (often, "has trained 3 times for this step")):
        with pytest.raises(RefusalError, match=reason):
            accept(node, header)
        with pytest.raises(RefusalError, match=reason):
            node.sessions.add_upload(step, bytes(16))


def test_a_session_s_key_and_step_are_removed_together(tmp_path: Path) -> None:
    """A session that was not used for 30 days goes at the next handshake; others stay, and the one it names, too."""
    nodes = nodes_in(tmp_path, 5)
    node, folder = nodes[0], folder_of(nodes[0])
    accept(node, header_for(nodes))
    rows_of(nodes, "0" * 32)
    long_ago = time.time() - (DAYS + 1) * 24 * 3600
    (folder / "notes").write_text("the owner's")
    for path in folder.iterdir():
        os.utime(path, (long_ago, long_ago))
    kept = public_of(node.sessions.key("0" * 32))
    node.key_properties("0" * 32)
    assert sorted(path.name for path in folder.iterdir()) == ["0" * 32, "notes"]
    assert public_of(node.sessions.key("0" * 32)) == kept
    with pytest.raises(RefusalError, match="has no key of the session"):
        node.sessions.key(SESSION)


def test_a_removal_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    node = nodes_in(tmp_path, 1)[0]
    node.key_properties(SESSION)
    rest = folder_of(node) / ".removed-x"
    rest.mkdir()
    os.utime(rest, (0, 0))
    node.key_properties(SESSION)
    assert not rest.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"private": "00"}', b"\xff"])
def test_damage_is_reported(tmp_path: Path, content: bytes) -> None:
    """A damaged memory must not count as an empty one."""
    nodes = nodes_in(tmp_path, 5)
    header = header_for(nodes)
    accept(nodes[0], header)
    for name in ("step.json", "key.json"):
        path = folder_of(nodes[0]) / SESSION / name
        path.write_bytes(content)
        with pytest.raises(StateError, match=rf"{name} is damaged"):
            accept(nodes[0], header)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "node-0").write_text("a file")
    with pytest.raises(StateError, match="the secure session is not stored, so nothing is sent"):
        nodes_in(tmp_path, 1)[0].key_properties(SESSION)
