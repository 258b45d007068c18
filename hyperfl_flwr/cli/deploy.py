"""The `hyperfl deploy` commands: write and check a deployment's files and keys.

Flower's own programs run the SuperLink and the nodes.
"""

from pathlib import Path
from typing import Annotated

import typer

from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.launch.console import err, out, parse_setting
from hyperfl_flwr.launch.findings import as_json, exit_code, print_finding
from hyperfl_flwr.launch.flower_env import DEFAULT_PORT

deployments = typer.Typer(help="Prepare and check a federation of SuperNodes on machines of different owners.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the deployment.")]


@deployments.command("init")
def run_init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the deployment's files.")],
    nodes: Annotated[int, typer.Option(help="Number of nodes; it cannot be changed later.")],
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


@deployments.command("register")
def run_register(folder: Folder) -> None:
    """Register the nodes' public keys with the running SuperLink; safe to repeat."""
    from hyperfl_flwr.deploy.register import register

    for line in register(Deployment.read(folder)):
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
    from hyperfl_flwr.deploy.check_server import check

    findings = []
    for finding in check(folder, dict(parse_setting(text) for text in set_ or ())):
        findings.append(finding)
        if not json:
            print_finding(out, finding)
    if json:
        typer.echo(as_json(findings))
    raise typer.Exit(exit_code(findings))


@deployments.command("renew")
def run_renew(folder: Folder) -> None:
    """Issue a new server certificate from the same authority; restart the SuperLink afterwards."""
    from hyperfl_flwr.deploy.provision import renew

    deployment = Deployment.read(folder)
    renew(deployment)
    out.print(str(deployment.server / "server.crt"), markup=False)
    err.print("restart the SuperLink; the nodes need no new files", markup=False)


@deployments.command("start-warnings", hidden=True)
def run_start_warnings() -> None:
    """Print the warnings that start.sh shows before Flower's program opens its ports."""
    from hyperfl_flwr.launch.other_accounts import deployment_warning

    if problem := deployment_warning():
        err.print(f"warning: {problem}", markup=False)


@deployments.command("node-arguments", hidden=True)
def run_node_arguments(folder: Annotated[Path, typer.Argument(metavar="NODE", help="A node's folder.")]) -> None:
    """Print the arguments that start.sh adds to the SuperNode's command, once the SuperLink accepts the node."""
    from hyperfl_flwr.deploy.admission import wait_for_admission
    from hyperfl_flwr.deploy.node_settings import node_arguments

    run_start_warnings()
    arguments = node_arguments(folder)
    wait_for_admission(folder, lambda line: err.print(line, markup=False))
    typer.echo(arguments)
