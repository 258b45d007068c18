"""A client that sleeps instead of training, and sends back what it received, plus one."""

import time

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Sleep, and answer."""
    time.sleep(float(context.run_config["sleep"]))
    received = unpack_arrays(message.content.array_records["arrays"])["x"]
    content = RecordDict({"arrays": pack_arrays({"x": received + 1})})
    return Message(content, reply_to=message)
