"""A cross-site matrix: what a node records of its answers, and which answers the server counts."""

import numpy as np
import pytest

from hyperfl_flwr.app.client import app
from hyperfl_flwr.privacy.budget import FILE, read_record
from hyperfl_flwr.protocol.queries import CORRECT, SCORE_MODELS
from hyperfl_flwr.runs.cross_site import CrossSite
from hyperfl_flwr.server.in_process_grid import FIRST_NODE_ID, InProcessGrid
from strategies.engine.query_clients import ask


def test_a_node_records_that_nothing_bounds_its_answers(federate, tmp_path):
    """After two rounds it sends the client's model, and then numbers about models that the server has chosen."""

    def make(number, flat):
        grid = InProcessGrid(app, number, flat)
        for node in range(number):
            own = {"state-dir": str(tmp_path / f"node-{node}"), "device": "cpu", "cross-site": True}
            grid._contexts[FIRST_NODE_ID + node].node_config |= own
        return grid

    federate("fedrep", 2, grid=make, num_clients=2, cross_site=True)
    for node in range(2):
        record = read_record(tmp_path / f"node-{node}" / FILE)
        assert [(entry.round, entry.release) for entry in record] == [(1, None), (2, None), (2, None), (2, None)]


def exaggerate(answers):
    answers.arrays[0][CORRECT] = answers.num_examples[0] + np.ones_like(answers.arrays[0][CORRECT])


def name_other_samples(answers):
    answers.num_examples[0] += 1


@pytest.mark.parametrize("change", [exaggerate, name_other_samples])
def test_a_client_with_impossible_answers_is_left_out(change, federate, monkeypatch):
    """The others keep their numbers: it is the matrix of the run before without the client's row and column."""
    whole = CrossSite.read(federate("fedrep", cross_site=True))
    counted = []

    def asked(grid, context, server_round, query):
        answers = ask(grid, context, server_round, query)
        if query.kind == SCORE_MODELS:
            counted.append(query)
            if len(counted) == 2:  # the first message was answered well
                change(answers)
        return answers

    monkeypatch.setattr("strategies.engine.cross_site.MESSAGE_BYTES", 1)  # a message for each model
    monkeypatch.setattr("strategies.engine.cross_site.ask", asked)
    found = CrossSite.read(federate("fedrep", cross_site=True))
    assert found.clients == whole.clients[1:]
    assert found.accuracy == [list(row[1:]) for row in whole.accuracy[1:]]


def test_a_model_is_better_elsewhere_on_the_data_of_a_client():
    """The model of client 0 is better than client 1's own on client 1's data; its own data are no matter."""
    found = CrossSite(
        clients=[0, 1, 2], samples=[9, 9, 9], accuracy=[[0.5, 0.9, 0.5], [0.4, 0.8, 0.1], [0.4, 0.2, 0.7]]
    )
    assert found.better_elsewhere == [1]
    assert found.own == pytest.approx((0.5 + 0.8 + 0.7) / 3)
