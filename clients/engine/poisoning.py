"""The context of a client in a simulation with malicious nodes."""

from dataclasses import replace

from clients.engine.context import ClientContext
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.poisoning import Trigger, with_flipped_labels


def with_adversary(context: ClientContext, *, is_malicious: bool) -> ClientContext:
    """Return a client's context with what `adversary.attack` does to it.

    With a backdoor, every client measures its success. The training data of a malicious client are changed; test and
    validation data never are.

    Args:
        context: The client's context.
        is_malicious: Whether the client's node is malicious.
    """
    adversary, data = context.config.adversary, context.data
    if adversary.attack == "label-flip" and is_malicious:
        return replace(context, data=with_flipped_labels(data))
    if adversary.attack != "backdoor":
        return context
    trigger = Trigger.of(adversary.target_class, adversary.trigger_size, context.mean, context.std)
    if is_malicious:
        # The same samples in every round: neither the hosting node nor a resume changes them.
        rng = numpy_generator(context.config.seed, "adversary", context.client)
        data = trigger.poisoned(data, adversary.poisoned_share, rng)
    return replace(context, data=data, trigger=trigger)
