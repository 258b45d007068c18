"""A server that sends each node an array in each round, and checks and counts the replies."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.server.exchange import exchange

ROUND_SECONDS = 300.0
"""Longest wait for the replies of a round."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and write their seconds and the number of correct replies as JSON."""
    settings = context.run_config
    rounds = []
    for server_round in range(int(settings["rounds"])):
        began, nodes = time.monotonic(), sorted(grid.get_node_ids())
        sent = np.full(int(settings["floats"]), server_round, dtype=np.float32)
        content = RecordDict({"arrays": pack_arrays({"x": sent})})
        messages = [Message(content, dst_node_id=node, message_type=MessageType.TRAIN) for node in nodes]
        correct, problems = 0, []
        for answer in exchange(grid, messages, ROUND_SECONDS):
            if answer.content is None:
                problems.append(answer.problem)
            else:
                received = unpack_arrays(answer.content.array_records["arrays"])["x"]
                correct += int(np.array_equal(received, sent + 1))
        seconds = time.monotonic() - began
        rounds.append({"nodes": len(nodes), "correct": correct, "problems": problems, "seconds": seconds})
        Path(str(settings["report"])).write_text(json.dumps(rounds))
