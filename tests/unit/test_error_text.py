"""The text of an error reply of Flower, as its user reads it."""

import pytest

from hyperfl_flwr.flower.messages import error_text

RAY = """<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'\x1b[36mray::ClientAppActor.run()\x1b[39m
  File "client_app.py", line 161, in __call__
    raise ValueError(f"two: {lines}")
KeyError: 'x'

During handling of the above exception, another exception occurred:

hyperfl_flwr.core.errors.DataError: two: lines
of text

The above exception was the direct cause of the following exception:

\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=5114)
    raise ClientAppException(str(ex)) from ex
flwr.clientapp.client_app.ClientAppException:
Exception ClientAppException occurred. Message: two: lines
of text'>"""


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("<class 'RuntimeError'>:<'no room'>", "RuntimeError: no room"),
        ("<class 'hyperfl_flwr.core.errors.DataError'>:<'a'>:<'b'>", "DataError: a'>:<'b"),
        (RAY, "DataError: two: lines\nof text"),
        ("the node is gone", "the node is gone"),
        ("<class 'ray.exceptions.RayTaskError(X)'>:<'a'>", "<class 'ray.exceptions.RayTaskError(X)'>:<'a'>"),
        ("", ""),
    ],
)
def test_it_ends_as_a_traceback(reason: str, text: str) -> None:
    assert error_text(reason) == text
