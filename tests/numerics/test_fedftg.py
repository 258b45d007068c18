"""FedFTG: the losses of generator and student, a round of fine-tuning by hand, and its special cases."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hyperfl_flwr.core.optimisers import Adam
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.generator import NOISE_DIM, Generator
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.training.ensemble import Ensemble
from hyperfl_flwr.training.fedftg import Tuning, fine_tune, generator_loss, student_loss
from hyperfl_flwr.training.fedgen import class_weights, diversity_loss

SHAPE, CLASSES, BATCH = (1, 8, 8), 3, 5
COUNTS = torch.tensor([[10.0, 0.0, 6.0], [30.0, 4.0, 2.0]])
SETTINGS = Tuning(
    iterations=2, student_steps=2, batch_size=BATCH, student_learning_rate=0.1, student_weight_decay=0.01, diversity=0.7
)


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, CLASSES)).eval()


def values_of(model):
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def generator():
    found = Generator(SHAPE, CLASSES, 2)
    found.load_state_dict(initial_state(found, torch_generator(0, "generator")), assign=True)
    return found.requires_grad_(True)


@pytest.mark.usefixtures("float64")
def test_the_losses_are_those_of_the_definition():
    s, t = torch.randn(BATCH, CLASSES), [torch.randn(BATCH, CLASSES) for _ in range(2)]
    labels = torch.tensor([0, 2, 1, 0, 2])
    weights = class_weights(COUNTS.double())[:, labels]
    expected = 0.0
    for b, label in enumerate(labels.tolist()):
        entropy = -float(functional.log_softmax(t[0][b], dim=0)[label])
        expected += float(weights[0, b]) * (entropy - float((s[b] - t[0][b]).abs().sum()) / CLASSES) / BATCH
    assert float(generator_loss(s, t[0], labels, weights[0])) == pytest.approx(expected, rel=1e-13)
    expected = 0.0
    for b in range(BATCH):
        for k in range(2):
            goal = functional.softmax(t[k][b], dim=0)
            entropy = -float((goal * functional.log_softmax(s[b], dim=0)).sum())
            expected += float(weights[k, b]) * entropy / (BATCH * CLASSES)
    assert float(student_loss(s, t, weights)) == pytest.approx(expected, rel=1e-13)


@pytest.mark.usefixtures("float64")
def test_equal_models_leave_the_student_as_it_is():
    """The gradient of the student's loss is 0 where it equals all teachers; with other teachers it is not."""
    student = network()
    images, labels = torch.randn(BATCH, *SHAPE), torch.tensor([0, 2, 1, 0, 2])
    weights = class_weights(COUNTS.double())[:, labels]
    for teachers, largest in (([student, student], 1e-16), ([student, network()], None)):
        student.zero_grad()
        student_loss(student(images), [each(images).detach() for each in teachers], weights).backward()
        gradient = max(float(parameter.grad.abs().max()) for parameter in student.parameters())
        assert gradient <= largest if largest else gradient > 1e-3


@pytest.mark.usefixtures("float64")
def test_two_iterations_are_those_of_the_description():
    """Generator and student equal a loop written from the description; running statistics do not change.

    Adam enlarges what rounding leaves of the gradients of biases before BatchNorm, which are 0: 1e-10.
    """
    student, teachers, made = network(), [network(), network()], generator()
    expected_student, expected_made = copy.deepcopy(student), copy.deepcopy(made)
    statistics = student[2].running_mean.clone()
    ensemble = Ensemble(network=network(), models=[values_of(teacher) for teacher in teachers])
    fine_tune(
        student,
        ensemble,
        COUNTS.double(),
        made,
        Adam(made.parameters(), lr=0.01),
        SETTINGS,
        torch_generator(0, "draws"),
    )
    rng = torch_generator(0, "draws")
    adam = torch.optim.Adam(expected_made.parameters(), lr=0.01)
    sgd = torch.optim.SGD(expected_student.parameters(), lr=0.1, weight_decay=0.01)
    for _ in range(2):
        labels = torch.multinomial(torch.tensor([40.0, 4.0, 8.0]), BATCH, replacement=True, generator=rng)
        noise = torch.randn(BATCH, NOISE_DIM, generator=rng)
        a = class_weights(COUNTS.double())[:, labels]
        for k, teacher in enumerate(teachers):
            images = expected_made(noise, labels)
            s, t = expected_student(images), teacher(images)
            apart = ((s - t).abs().sum(dim=1) / CLASSES * a[k]).mean()
            entropy = (functional.cross_entropy(t, labels, reduction="none") * a[k]).mean()
            adam.zero_grad()
            (-apart + entropy + 0.7 / 2 * diversity_loss(noise, images)).backward()
            adam.step()
        images = expected_made(noise, labels).detach()
        goal = sum(a[k][:, None] * functional.softmax(teacher(images), dim=1) for k, teacher in enumerate(teachers))
        for _ in range(2):
            sgd.zero_grad()
            entropies = -(goal.detach() * functional.log_softmax(expected_student(images), dim=1)).sum()
            (entropies / (BATCH * CLASSES)).backward()
            sgd.step()
    for one, other in ((student, expected_student), (made, expected_made)):
        for found, wanted in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)
    torch.testing.assert_close(student[2].running_mean, statistics, rtol=0, atol=0)


def test_a_teacher_s_share_decides_the_goal():
    """Of images of class 1, which only client 1 has, only its predictions count."""
    student, labels = torch.zeros(2, CLASSES), torch.tensor([1, 1])
    weights = class_weights(COUNTS)[:, labels]
    logits = [torch.randn(2, CLASSES) for _ in range(2)]
    alone = student_loss(student, logits[1:], weights[1:])
    torch.testing.assert_close(student_loss(student, logits, weights), alone)
    np.testing.assert_array_equal(weights[0].numpy(), 0)
