"""The attack that HyperFL's paper tailors to its own defence: recover the embedding, then invert the features.

Guo et al., AAAI 2025, appendix D: first v by equation 10, then x by model inversion (He, Zhang, Lee: "Model Inversion
Attacks Against Collaborative Inference", ACSAC 2019). The paper shows one figure, in which nothing is recovered, and
gives no number.

Equation 10 is `argmin over v of L_grad(theta, v; phi, G)` with the observed gradient G, and an output theta of the
hypernetwork that takes the place of the label, since the classifier is unknown. As printed it names no loss between
theta and h(v; phi), of which a gradient could be computed. With the squared error of a label and an output,
|h(v; phi) - theta|^2 / 2, and g = h(v; phi) - theta, that gradient is

    dL/dH = z g^T      dL/dc = g      dL/dW1 = d v^T      dL/db1 = d

which is of the form of G, whatever the clients' loss is. So L_grad vanishes at the true v and g, which
`hyperfl_flwr.attacks.readout` reads off in closed form. The paper calls the search for them hard, since theta is large.
With theta = h(v; phi) the extractor is known.

Model inversion compares the features of candidates with those of the private image, and the paper does not say whence
the attacker takes these. They are in the upload as well: the last layer of the extractor, a = W u + b, has the
gradients dL/dW = delta u^T and dL/db = delta. For one image, [dL/dW | dL/db] = delta [u, 1]^T and the same at a
candidate x differ by |delta|^2 |u - u(x)|^2, the loss of He et al. up to a factor, and have the cosine of [u, 1] and
[u(x), 1]. Several images are matched by the deltas that explain the gradient best. The attack is thus
`hyperfl_flwr.attacks.head_gradient` on the last layer only, with the same search.
"""

from collections.abc import Sequence

from hyperfl_flwr.attacks import head_gradient
from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.readout import Readout, read_out
from hyperfl_flwr.runs.observation import Observation

DEFAULTS = head_gradient.DEFAULTS
"""Defaults; the paper gives none."""


def tailored(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct images from the features that a hypernetwork's upload reveals.

    Args:
        observations: Observations of HyperFL.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; labels are ignored.

    Returns:
        n images per client.

    Raises:
        ValueError: If the attack cannot use the extractor, see `hyperfl_flwr.attacks.head_gradient.check_extractor`.
    """

    def read(observation: Observation) -> Readout:
        return read_out(observation, knowledge)

    return head_gradient.invert(observations, read, knowledge, settings, last_layer_only=True)
