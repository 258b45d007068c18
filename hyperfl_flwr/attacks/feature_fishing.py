"""Fish for one image among many of one class: a malicious server forges a classifier with a threshold on a feature.

Wen, Geiping, Fowl, Goldblum, Goldstein: "Fishing for User Data in Large-Batch Federated Learning via Gradient
Magnification", ICML 2022, feature fishing. It is for clients whose images are of one class c, where
`hyperfl_flwr.attacks.fishing` finds the mean gradient of all of them. All rows of the classifier are zero except that
of class c, whose logit compares a feature h of an image with a threshold t:

    z_c = -k (h - t) + log(K - 1)      p_c = sigmoid(-k (h - t))      h = d^T a

An image of class c has the gradient (1 - p_c) k d at its features a: none below the threshold, and k d above it. With a
large k the gradient of the extractor is that of the only image above the threshold. If none is above it, the weights
1 - p_c fall as e^(k h), so that the image with the largest h still dominates if k times its distance to the next is
large.

The paper's h is one number of a. Here it is the first principal component of the features of public images of the
class, along which they differ most, with the sign that gives it the longer tail upwards; d has length 1. The threshold
is the quantile of h among the public images above which half an image of each batch is expected. The paper can also
find the threshold over several rounds, which is not used here.

**Several steps.** The first step with an image above the threshold moves z_c of all images up, since their features are
alike. Then no image has a gradient, and further steps add nothing: the upload is still the gradient of one image. That
needs a large k^2 times the learning rate.

**Images of other classes.** The gradient of an image with the label y at its features is m(a) - W_y, where m(a) =
sum_i p_i W_i does not depend on y. So no classifier silences images of both class c and others that have the same
features. Here an image of another class has the gradient -k d below the threshold, and hides the image in a batch.
"""

import math

import torch
from torch.func import functional_call

from hyperfl_flwr.attacks.base import build_structure
from hyperfl_flwr.attacks.fishing import FISHED, with_row
from hyperfl_flwr.attacks.forging import first_component, normalised
from hyperfl_flwr.attacks.head_gradient import check_extractor
from hyperfl_flwr.attacks.knowledge import PublicImages, PublicKnowledge
from hyperfl_flwr.attacks.readout import EXTRACTOR, target_names
from hyperfl_flwr.runs.observation import Arrays

_SHARPNESS = 50.0
"""k times the standard deviation of h. A larger k separates images better whose h differ by little, but an image below
the threshold, too, is caught only within about 15 / k of it, as p_c is rounded to float32."""

_EXPECTED = 0.5
"""Number of images of a batch above the threshold that is expected."""

_LEAST = 10
"""Number of public images of the class below which those of all classes take their place."""


def check_feature_fishing(knowledge: PublicKnowledge) -> None:
    """Check that the attack can be used in a run.

    Raises:
        ValueError: If `hyperfl_flwr.attacks.head_gradient.check_extractor` refuses the extractor, or if there is only
            one class.
    """
    check_extractor(knowledge)
    if knowledge.num_classes < 2:
        raise ValueError("it makes the class of some images improbable, but there is only one class; see data.classes")


@torch.no_grad()
def forge_feature_fishing(sent: Arrays, knowledge: PublicKnowledge, public: PublicImages, num_examples: int) -> Arrays:
    """Forge the classifier, see `hyperfl_flwr.attacks.forging.Forge`.

    Raises:
        ValueError: If the classifier is not sent.
    """
    known = public.of_class(FISHED)
    known = public.images if len(known) < _LEAST else known
    extractor = build_structure(knowledge).extractor
    own = {name.removeprefix(f"{EXTRACTOR}."): torch.tensor(sent[key]) for key, name in target_names(sent).items()}
    values = {name: own[name] for name, _ in extractor.named_parameters()}
    features = functional_call(extractor, values, (normalised(known, knowledge),)).double()
    direction = first_component(features)
    if float(((features - features.mean(dim=0)) @ direction).pow(3).mean()) < 0:
        direction = -direction
    measured = features @ direction
    in_batch = min(knowledge.steps.batch_size, math.ceil(num_examples / knowledge.summed_clients))
    share = min(_EXPECTED / (in_batch * knowledge.summed_clients), 0.5)
    factor = _SHARPNESS / float(measured.std())
    threshold = factor * float(measured.quantile(1 - share)) + math.log(knowledge.num_classes - 1)
    return with_row(sent, knowledge, (-factor * direction).float(), threshold)
