"""A dead Ray actor is replaced.

Flower's simulation puts an actor whose process died back into its pool and never starts another: the same nodes are
then missing in every later round, while the run ends as completed. Here the pool starts a fresh actor instead.

Wraps `flwr.simulation.ray_transport.ray_actor.BasicActorPool`; Flower offers no choice of the pool.
"""

import sys
from typing import Any

from hyperfl_flwr.flower.log import log


def replace_dead_actors() -> None:
    """Teach Flower's actor pool in this process to replace dead actors; without Ray, nothing happens."""
    try:
        from flwr.simulation.ray_transport.ray_actor import BasicActorPool
        from ray.exceptions import OutOfMemoryError, RayActorError, WorkerCrashedError
    except ImportError:
        return
    deadly = (RayActorError, WorkerCrashedError, OutOfMemoryError)

    def add_actor_back_to_pool(self: BasicActorPool, future: Any) -> None:  # noqa: ANN401 - a Ray reference
        actor = self._future_to_actor.pop(future)
        # The pool calls this while it handles the exception that the actor's death raised, if there was one.
        if isinstance(sys.exc_info()[1], deadly):
            log(30, "A simulation process died; a fresh one takes its place.")
            actor = self.create_actor_fn()  # type: ignore[no-untyped-call]
        self.pool.append(actor)

    BasicActorPool.add_actor_back_to_pool = add_actor_back_to_pool  # type: ignore[method-assign]
