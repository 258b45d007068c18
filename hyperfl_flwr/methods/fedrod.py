"""FedRoD: the averaged model is trained on a balanced loss; each client adds a private classifier to it."""

from hyperfl_flwr.core.method import Method, Upload

METHOD = Method(
    name="fedrod",
    title="federated averaging on a class-balanced loss, with a private classifier that is added to the common one",
    paper="Chen and Chao, ICLR 2022",
    sends="the whole model, without the private classifier",
    keeps="a second classifier",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.fedrod:FedRoDClient",
    strategy="strategies.fedavg:FedAvg",
    private_classifier=True,
)
