"""Alter the Python that is installed on a node, as its owner could, so that training waits and replies are false.

With this folder in PYTHONPATH, Python imports this file before a program begins. In client apps, training then waits in
its first batch while its round is later than the number in the file that MAY_TRAIN names. If FALSE_REPLIES names a
file, each of its lines alters one reply before it is sent.
"""

import os
import sys
import time
from pathlib import Path

if Path(sys.argv[0]).name == "flwr-clientapp" or sys.argv[1:3] == ["deploy", "worker"]:  # forks them
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from numpy import random
    from torch import Tensor
    from torch.nn import functional

    MAY_TRAIN = Path(os.environ["MAY_TRAIN"])
    FALSE_REPLIES = {
        "norm": lambda value: value * 0 + value.dtype.type(1e6),
        "nan": lambda value: value * value.dtype.type("nan"),
        "shape": lambda value: value.ravel(),
    }
    answered, compared = ClientApp.__call__, functional.cross_entropy
    in_training = [0]

    def waiting(*args: Tensor, **settings: object) -> Tensor:
        """Compute a loss; in training, wait until its round may train."""
        while int(MAY_TRAIN.read_text()) < in_training[0]:
            time.sleep(0.1)
        return compared(*args, **settings)

    def answer(self: ClientApp, message: Message, context: Context) -> Message:
        """Answer a message; alter a training reply as the next line of the file names."""
        trains = message.metadata.message_type == "train"
        in_training[0] = message.content["config"]["round"] if trains else 0
        reply = answered(self, message, context)
        file = Path(os.environ.get("FALSE_REPLIES", "/nonexistent"))
        left = file.read_text().split() if file.exists() else []
        if left and trains and reply.has_content():
            file.write_text("\n".join(left[1:]))
            packing = sys.modules["hyperfl_flwr.protocol.packing"]  # the app's own
            arrays = reply.content["arrays"]
            if left[0] in FALSE_REPLIES:
                changed = {key: FALSE_REPLIES[left[0]](value) for key, value in packing.unpack_arrays(arrays).items()}
                reply.content["arrays"] = packing.pack_arrays(changed)
            elif left[0] == "large":
                noise = {"noise": random.default_rng(0).standard_normal(25_000_000)}
                reply.content["more"] = packing.pack_arrays(noise)
        return reply

    ClientApp.__call__ = answer
    functional.cross_entropy = waiting
