"""The `hyperfl deploy` commands: write and check a deployment's files and keys.

Flower's own programs run the SuperLink and the nodes.
"""

import contextlib
import shlex
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from hyperfl_flwr.cli.groups import ListedCommands
from hyperfl_flwr.core.packages.quick_imports import quick_imports
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.launch.console import err, out, parse_setting
from hyperfl_flwr.launch.findings import as_json, exit_code, print_finding
from hyperfl_flwr.launch.flower.env import DEFAULT_PORT

deployments = typer.Typer(
    cls=ListedCommands, rich_markup_mode=None,
    help="Prepare and check a federation of SuperNodes on machines of different owners.",
)  # fmt: skip

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the deployment.")]


@deployments.command("init")
def run_init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the deployment's files.")],
    nodes: Annotated[int, typer.Option(help="Number of nodes; `hyperfl deploy add-node` adds more.")],
    host: Annotated[
        str, typer.Option(help="Host name or IPv4 address under which the nodes reach this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the SuperLink.")] = DEFAULT_PORT,
) -> None:
    """Write the certificates, keys, start scripts and settings of a SuperLink and its nodes."""
    from hyperfl_flwr.deploy.provision import init

    deployment = Deployment(folder=folder.absolute(), host=host, port=port, num_nodes=nodes)
    init(deployment)
    out.print(f"server: {deployment.server}", markup=False)
    for number in range(nodes):
        out.print(f"node {number}: {deployment.node(number)}", markup=False)
    for line in (
        f"start the SuperLink: sh {shlex.quote(str(deployment.server / 'start.sh'))}",
        f"while it runs: hyperfl deploy register {shlex.quote(str(deployment.folder))}",
        "give each node's folder to its owner, for whom it has a README.txt, and delete it here",
    ):
        err.print(f"next: {line}", markup=False, soft_wrap=True)


@deployments.command("add-node")
def run_add_node(
    folder: Folder,
    number: Annotated[
        int | None,
        typer.Option(help="Number of the new node; a repeated call then adds no other.", show_default="the next one"),
    ] = None,
) -> None:
    """Add a node to a deployment, also while runs go on, and say what to do next; prints the files written."""
    from hyperfl_flwr.deploy.add_node import add_node, next_steps

    deployment, files = add_node(folder, number)
    for file in files:
        out.print(str(file), markup=False, soft_wrap=True)
    for line in next_steps(deployment):
        err.print(f"next: {line}", markup=False, soft_wrap=True)


@deployments.command("register")
def run_register(folder: Folder) -> None:
    """Register the nodes' public keys with the running SuperLink, and unregister replaced ones; safe to repeat."""
    from hyperfl_flwr.deploy.register import register

    with Deployment.locked(folder) as deployment:
        for line in register(deployment):
            out.print(line, markup=False)


@deployments.command("check")
def run_check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the deployment or of a node.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="On a node: a data setting of the run, such as data.classes=a,b; repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Check a deployment on the operator's or a node's machine; exit code 1 if there is an error."""
    from hyperfl_flwr.deploy.checks.server import check

    findings = []
    for finding in check(folder, dict(parse_setting(text) for text in set_ or ())):
        findings.append(finding)
        if not json:
            print_finding(out, finding)
    if json:
        typer.echo(as_json(findings))
    raise typer.Exit(exit_code(findings))


@deployments.command("status")
def run_status(
    folder: Folder,
    serve: Annotated[bool, typer.Option("--serve", help="Serve it as a page on this machine, until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(help="Port of the page; 0 for a free one.", min=0, max=65535)] = 8790,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the SuperLink, the nodes and the latest runs of a deployment; nothing is changed."""
    from hyperfl_flwr.deploy.status import Status

    deployment = Deployment.read(folder)
    if serve:
        from hyperfl_flwr.deploy.status_server import StatusServer

        with StatusServer(deployment, port) as server:
            out.print(server.address, markup=False)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
        return
    found = Status.of(deployment)
    if json:
        typer.echo(dumps(found.entry(), indent=2))
        return
    for line in found.lines():
        out.print(line, markup=False, soft_wrap=True)


@deployments.command("own-key")
def run_own_key(folder: Annotated[Path, typer.Argument(metavar="NODE", help="Your node's folder.")]) -> None:
    """Make a new key for your node, which the operator has never had, and print the file of its public part."""
    from hyperfl_flwr.deploy.peers import own_key

    out.print(str(own_key(folder)), markup=False)
    err.print("send this file to the operator; the node can connect once the operator has registered it", markup=False)


@deployments.command("accept-key")
def run_accept_key(
    folder: Folder,
    number: Annotated[int, typer.Argument(help="Number of the node.", show_default=False)],
    file: Annotated[Path, typer.Argument(help="The node.pub that its owner has sent.")],
) -> None:
    """Replace the public key of a node by one that its owner has made; prints the files that were written."""
    from hyperfl_flwr.deploy.peers import accept_key

    with Deployment.locked(folder) as deployment:
        lines = list(accept_key(deployment, number, file))  # all before the first is printed, which may fail
    for line in lines:
        out.print(line, markup=False)
    words = "run `hyperfl deploy register`, reload nginx if you use it, and send peers.toml to all owners"
    err.print(words, markup=False)


@deployments.command("peers")
def run_peers(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the deployment or of a node.")],
) -> None:
    """Print fingerprints of all nodes' keys, for the owners to compare; in a deployment, also write peers.toml."""
    from hyperfl_flwr.deploy.peers import describe, is_deployment, node_peers, write_peers

    if is_deployment(folder):
        with Deployment.locked(folder) as deployment:
            peers = write_peers(deployment)
    else:
        peers = node_peers(folder.absolute())
    for line in describe(peers):
        out.print(line, markup=False)


@deployments.command("renew")
def run_renew(folder: Folder) -> None:
    """Issue a new server certificate from the same authority; restart the SuperLink and nginx afterwards."""
    from hyperfl_flwr.deploy.provision import renew

    with Deployment.locked(folder) as deployment:
        renew(deployment)
    out.print(str(deployment.server / "server.crt"), markup=False)
    err.print("restart the SuperLink, and nginx if you use it; the nodes need no new files", markup=False)


@deployments.command("move")
def run_move(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the deployment or of a node.")],
    host: Annotated[
        str | None, typer.Option(help="The SuperLink's new host name or IPv4 address.", show_default="the present one")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The SuperLink's new port.", show_default="the present one")] = None,
) -> None:
    """Change the SuperLink's address in a deployment's files or in a node's folder; prints the files written."""
    from hyperfl_flwr.deploy.move import move_deployment, move_node
    from hyperfl_flwr.deploy.peers import is_deployment

    if not is_deployment(folder):
        out.print(str(move_node(folder.absolute(), host, port)), markup=False)
        err.print("restart this node with its start.sh", markup=False)
        return
    with Deployment.locked(folder) as deployment:
        files = list(move_deployment(deployment, host, port))  # all before the first is printed, which may fail
        moved = Deployment.read(folder)
    for file in files:
        out.print(str(file), markup=False)
    err.print(
        f"restart the SuperLink, and nginx if you use it; each owner runs `hyperfl deploy move NODE --host "
        f"{moved.host} --port {moved.port}` and restarts the node",
        markup=False,
        soft_wrap=True,
    )


@deployments.command("start-warnings", hidden=True)
def run_start_warnings(
    host: Annotated[str, typer.Option(help="Address on which the SuperLink listens.")] = "0.0.0.0",  # noqa: S104
    port: Annotated[int | None, typer.Option(help="Port that must be free; otherwise the exit code is 3.")] = None,
) -> None:
    """Print the warnings that start.sh shows before Flower's program opens its ports, and check a port."""
    from hyperfl_flwr.launch.other_accounts import deployment_warning

    if problem := deployment_warning():
        err.print(f"warning: {problem}", markup=False)
    if port is not None:
        from hyperfl_flwr.deploy.checks.server import is_in_use

        if is_in_use(host, port):
            err.print(
                f"error: port {port} of this machine is in use, perhaps by a SuperLink that already runs; see by which "
                f"program with: ss -ltnp 'sport = :{port}'",
                markup=False,
            )
            raise typer.Exit(3)


@deployments.command("node-arguments", hidden=True)
def run_node_arguments(
    folder: Annotated[Path, typer.Argument(metavar="NODE", help="A node's folder.")],
    with_worker: Annotated[bool, typer.Option("--with-worker", help="If node.toml allows it, for a worker.")] = False,
) -> None:
    """Print the arguments that start.sh adds to the SuperNode's command, once the SuperLink accepts the node."""
    with quick_imports():
        from hyperfl_flwr.deploy.admission import wait_for_admission
    from hyperfl_flwr.deploy.node_settings import node_arguments, read_settings
    from hyperfl_flwr.deploy.worker import is_possible
    from hyperfl_flwr.deploy.worker_secret import supernode_arguments

    run_start_warnings()
    arguments = node_arguments(folder)
    wait_for_admission(folder, lambda line: err.print(line, markup=False))
    if with_worker and read_settings(folder).worker == "auto" and is_possible():
        arguments = f"{supernode_arguments(folder)} {arguments}"  # after the wait: an earlier SuperNode has ended
    typer.echo(arguments)


@deployments.command("worker", hidden=True)
def run_worker(
    folder: Annotated[Path, typer.Argument(metavar="NODE", help="A node's folder.")],
    port: Annotated[int, typer.Option(help="Loopback port of the SuperNode.")],
    supernode: Annotated[int, typer.Option(help="Process id of the SuperNode.")],
) -> None:
    """Start the process of each of a SuperNode's messages, until the SuperNode ends."""
    from hyperfl_flwr.deploy.worker import serve

    serve(folder, port, supernode)
