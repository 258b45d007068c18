"""What an owner can do who wants a node to lie: alter the Flower that is installed there.

With this folder in PYTHONPATH, Python imports this file before a program begins. Client apps then send what they have
computed with something done to it, once for each line of the file that LIES names.
"""

import os
import sys
from pathlib import Path

if Path(sys.argv[0]).name == "flwr-clientapp":
    from flwr.app import Array, ArrayRecord, Context, Message
    from flwr.clientapp import ClientApp

    LIES = {
        "norm": lambda value: value * 0 + value.dtype.type(1e6),
        "nan": lambda value: value * value.dtype.type("nan"),
        "shape": lambda value: value.ravel(),
    }
    told = ClientApp.__call__

    def lying(self: ClientApp, message: Message, context: Context) -> Message:
        """Answer a message, and training with the next lie."""
        reply = told(self, message, context)
        file = Path(os.environ["LIES"])
        lies = file.read_text().split() if file.exists() else []
        if lies and message.metadata.message_type == "train" and reply.has_content():
            file.write_text("\n".join(lies[1:]))
            arrays = reply.content["arrays"]
            reply.content["arrays"] = ArrayRecord({key: Array(LIES[lies[0]](arrays[key].numpy())) for key in arrays})
        return reply

    ClientApp.__call__ = lying
