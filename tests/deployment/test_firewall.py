"""The firewall rules of docs/how-to/deploy-security.md, in a separate network namespace."""

import re
import shutil
import subprocess
import sys

import pytest
from gates import PAGE

ISOLATED = ("unshare", "--map-root-user", "--net")

PROGRAM = """
import socket

listener = socket.create_server(("127.0.0.1", 8443), backlog=200)
opened = []
for number in range(110):
    connection = socket.socket()
    connection.settimeout(0.2)
    try:
        connection.connect(("127.0.0.1", 8443))
    except OSError as error:
        print(type(error).__name__, end=" ")
    opened.append(connection)
"""
"""Open 110 connections from one address and print the errors of those that fail."""


def page_rules() -> tuple[list[str], str]:
    """Return the page's commands for known addresses, and the rule that limits connections."""
    found = [line.removeprefix("$ ") for line in PAGE.read_text().splitlines() if line.startswith("$ nft add ")]
    assert [re.search("table|chain|saddr !=|ct count", line)[0] for line in found] == [  # type: ignore[index]
        "table", "chain", "saddr !=", "ct count",
    ]  # fmt: skip
    return found[:3], found[3]


def can_isolate() -> bool:
    if not all(shutil.which(name) for name in ("nft", "ip", "unshare")):
        return False
    return subprocess.run([*ISOLATED, "nft", "list", "ruleset"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_isolate(), reason="needs nft, ip, and a network namespace of one's own")


def failures(rules: list[str]) -> list[str]:
    """Return the errors of the connections that the rules block."""
    commands = ["ip link set lo up", *rules, f"exec {sys.executable} -c '{PROGRAM}'"]
    command = [*ISOLATED, "sh", "-ec", "\n".join(commands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_known_addresses_alone_get_through() -> None:
    (table, chain, rule), _ = page_rules()
    assert failures([table, chain, rule]) == []
    assert failures([table, chain, rule.replace("127.0.0.1, ", "")]) == ["TimeoutError"] * 110


def test_an_address_has_a_hundred_connections() -> None:
    (table, chain, _), rule = page_rules()
    assert failures([table, chain, rule]) == ["ConnectionRefusedError"] * 10
