"""SCAFFOLD: averaging with control variates that remove the drift of local training."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import PositiveFloat, Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class ScaffoldConfig(Section):
    """Settings of SCAFFOLD."""

    key: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD"

    server_learning_rate: PositiveFloat = setting(
        1.0,
        "Step size η_g of the server: the share of the way from the model that was sent to the mean of the clients' "
        "models. The paper's experiments use 1.",
    )


METHOD = Method(
    name="scaffold",
    title="federated averaging; control variates remove the drift of local training",
    paper="Karimireddy et al., ICML 2020",
    sends="the whole model, and the change of the client's control variate",
    keeps="its control variate",
    uploads=(Upload(part="model", form="values"), Upload(part="control", form="gradient")),
    learning_rate=0.05,
    client="clients.scaffold:ScaffoldClient",
    strategy="strategies.scaffold:Scaffold",
    tasks=ALL_TASKS,
    settings=(ScaffoldConfig,),
)
