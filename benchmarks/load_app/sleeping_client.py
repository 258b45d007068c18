"""A client that sleeps instead of training, and sends back what it received, plus one."""

import time

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Sleep, and answer."""
    time.sleep(float(context.run_config["sleep"]))
    received = message.content.array_records["arrays"]["x"].numpy()
    content = RecordDict({"arrays": ArrayRecord({"x": Array(received + 1)})})
    return Message(content, reply_to=message)
