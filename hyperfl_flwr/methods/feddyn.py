"""FedDyn: averaging with local losses that are changed so that their minima agree."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import PositiveFloat, Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class FedDynConfig(Section):
    """Settings of FedDyn."""

    key: ClassVar[str] = "feddyn"
    title: ClassVar[str] = "FedDyn"

    alpha: PositiveFloat = setting(
        0.01,
        "Strength α of the pull towards the received model, and step size of the clients' and the server's "
        "corrections. The paper's grid is 0.1, 0.01 and 0.001.",
    )


METHOD = Method(
    name="feddyn",
    title="federated averaging; each local loss gets a linear term and a pull, so that their minima agree",
    paper="Acar et al., ICLR 2021",
    sends="the whole model",
    keeps="a linear term of its loss",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.03,
    client="clients.feddyn:FedDynClient",
    strategy="strategies.feddyn:FedDyn",
    tasks=ALL_TASKS,
    settings=(FedDynConfig,),
)
