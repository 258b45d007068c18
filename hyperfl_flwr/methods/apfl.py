"""APFL: federated averaging, and a private model that is mixed with the shared one."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import Section, Share, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class APFLConfig(Section):
    """Settings of APFL."""

    key: ClassVar[str] = "apfl"
    title: ClassVar[str] = "APFL"

    alpha: Share = setting(
        0.5, "Share α of the private model in a client's mixture, at first; 1 is the private model alone."
    )
    adaptive: bool = setting(True, "Whether each client adapts α, by one gradient step a round at `learning-rate`.")


METHOD = Method(
    name="apfl",
    title="federated averaging, and a private model that is mixed with the shared one",
    paper="Deng et al., 2020",
    sends="the whole model",
    keeps="another whole model, and a weight between both",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.apfl:APFLClient",
    strategy="strategies.fedavg:FedAvg",
    tasks=ALL_TASKS,
    settings=(APFLConfig,),
)
