"""pFedHN-PC: a hypernetwork on the server generates feature extractors, classifiers stay on the clients."""

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.tasks import ALL_TASKS
from hyperfl_flwr.methods.pfedhn import PFedHNConfig, targets

METHOD = Method(
    name="pfedhn-pc",
    title="a hypernetwork on the server generates feature extractors; the classifier stays private",
    paper="Shamsian et al., ICML 2021",
    sends="the change of the generated feature extractor",
    keeps="the classifier",
    uploads=(Upload(part="extractor", form="decrease", separate_start=True),),
    learning_rate=0.03,
    client="clients.pfedhn:PFedHNPCClient",
    strategy="strategies.pfedhn:PFedHNPC",
    tasks=ALL_TASKS,
    settings=(PFedHNConfig,),
    targets=targets,
)
