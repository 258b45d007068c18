"""Evaluation of a client's models on its test data, on validation data, and on the data set's test data."""

from collections.abc import Callable, Mapping, Sequence

import torch
from flwr.app import ConfigScalar as Scalar
from torch import Tensor, nn

from clients.engine.best_model import BestModel
from clients.engine.client_model import ClientModel
from clients.engine.context import keep_evaluation
from clients.engine.parameter_groups import ParameterGroups
from clients.engine.reported_metrics import Kind, backdoor_name, global_name, score_metrics, validation_name
from hyperfl_flwr.core.device import send
from hyperfl_flwr.metrics.evaluation import BATCH, evaluate
from hyperfl_flwr.metrics.scores import Scores
from hyperfl_flwr.training.local_sgd import Predict

CHUNK = 2000
"""Number of images of the global test set that are moved to the device at a time."""


class LocalEvaluation(ParameterGroups, ClientModel):
    """Evaluates a client's models.

    Attributes:
        round: The federated round that is trained.
    """

    round: int

    def networks(self) -> Sequence[nn.Module]:
        """Return all modules that are switched between training and evaluation; by default the groups' modules."""
        return list(self.groups.values())

    def set_mode(self, *, training: bool) -> None:
        """Switch BatchNorm between batch (training) and running statistics, and Dropout on (training) or off."""
        for module in self.networks():
            module.train(training)

    def scored(self, kind: Kind, after_round: int) -> tuple[Scores, dict[str, Scalar]]:
        """Evaluate a kind of model on the client's test data, and on validation data that decide about rounds.

        On a deployed node, the results on test data are also stored.

        Returns:
            The results on test data, and the numbers that leave the client.
        """
        self.set_mode(training=False)
        scores, metrics = self._metrics(kind, self.received_predictor() if kind == "aggregate" else self.predictor())
        if self.context.keeps_evaluations:
            keep_evaluation(self.context, kind, after_round, scores)
        return scores, metrics

    def keep_best(self, scores: Scores, metrics: Mapping[str, Scalar]) -> None:
        """Compare the model after local training with the best one so far, and keep the better one."""
        new = BestModel(
            round=self.round,
            merit=scores.task.merit(float(metrics[validation_name("personalized", scores.task)])),
            test_score=scores.score,
            tensors=self.target_state(),
        )
        self.best = new if self.best is None else self.best.or_better(new)

    def scored_best(self) -> dict[str, Scalar]:
        """Evaluate the client's best model; the received one if the client was never trained."""
        predict = self.received_predictor()
        if self.best is not None:
            model = self.new_target()
            model.load_state_dict(
                {name: send(each, self.context.device) for name, each in self.best.tensors.items()}, assign=True
            )
            predict = model.eval()
        return self._metrics("kept", predict)[1]

    def _metrics(self, kind: Kind, predict: Predict) -> tuple[Scores, dict[str, Scalar]]:
        """Evaluate a model on test data, on validation data that decide about rounds, and on images with a trigger."""
        data = self.context.data
        scores = evaluate(predict, data.test_images, data.test_labels)
        metrics = score_metrics(kind, scores)
        if data.validation is not None:
            name, deciding = validation_name(kind, scores.task), scores.task.deciding
            metrics[name] = evaluate(predict, *data.validation).value(deciding)
        if self.context.trigger is not None:
            images, targets = self.context.trigger.test_samples(data)
            if len(images):
                metrics[backdoor_name(kind)] = evaluate(predict, images, targets).score
        return scores, metrics

    def global_score(self, kind: Kind, predictor: Callable[[], Predict]) -> dict[str, Scalar]:
        """Return the main score on all test data of the data set; empty without `data.global-test`."""
        if self.context.global_test is None:
            return {}
        images, labels = self.context.global_test
        predict, device = predictor(), self.context.device

        def here(chunk: Tensor) -> Tensor:
            # In chunks, since the test data of all clients may not fit on the device, and each copy waits for it.
            return torch.cat([predict(batch) for batch in torch.split(send(chunk, device), BATCH)]).cpu()

        scores = evaluate(here, images, labels, batch_size=CHUNK)
        return {global_name(kind, scores.task): scores.score}
