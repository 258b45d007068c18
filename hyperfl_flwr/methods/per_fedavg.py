"""Per-FedAvg: the averaged model is trained to be a good start for one gradient step on each client's data."""

from typing import ClassVar, Literal

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import NonNegativeFloat, Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class PerFedAvgConfig(Section):
    """Settings of Per-FedAvg."""

    key: ClassVar[str] = "per-fedavg"
    title: ClassVar[str] = "Per-FedAvg"

    alpha: NonNegativeFloat = setting(
        0.01,
        "Learning rate α of the one step that adapts the model to a client; the paper's is 0.01. The rate β of local "
        "training is `learning-rate`. 0 does not adapt.",
    )
    mode: Literal["fo", "hf"] = setting(
        "fo",
        "Gradient of the loss after the step. `fo`: to first order. `hf`: all of it, with its product by the Hessian "
        "of the loss before the step.",
    )


METHOD = Method(
    name="per-fedavg",
    title="federated averaging of a model from which one gradient step leads to a client's own",
    paper="Fallah et al., NeurIPS 2020",
    sends="the whole model",
    keeps="nothing",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.per_fedavg:PerFedAvgClient",
    strategy="strategies.fedavg:FedAvg",
    tasks=ALL_TASKS,
    settings=(PerFedAvgConfig,),
)
