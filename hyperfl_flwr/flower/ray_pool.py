"""Replace dead Ray actors in Flower's simulation.

Flower's simulation puts an actor back into its pool even if the actor's process died. The same nodes are then missing
in every later round, yet the run ends as completed. With this patch the pool starts a new actor instead.

Wraps `flwr.simulation.ray_transport.ray_actor.BasicActorPool`; Flower offers no choice of the pool.
"""

import sys
from typing import Any

from hyperfl_flwr.flower.log import log


def replace_dead_actors() -> None:
    """Patch Flower's actor pool in this process so that it replaces dead actors; does nothing without Ray."""
    try:
        from flwr.simulation.ray_transport.ray_actor import BasicActorPool
        from ray.exceptions import OutOfMemoryError, RayActorError, WorkerCrashedError
    except ImportError:
        return
    deadly = (RayActorError, WorkerCrashedError, OutOfMemoryError)

    def add_actor_back_to_pool(self: BasicActorPool, future: Any) -> None:  # noqa: ANN401 - a Ray reference
        actor = self._future_to_actor.pop(future)
        # If the actor died, the pool calls this method while it handles the exception that its death raised.
        if isinstance(sys.exc_info()[1], deadly):
            log(30, "A simulation process died; a new process replaces it.")
            actor = self.create_actor_fn()  # type: ignore[no-untyped-call]
        self.pool.append(actor)

    BasicActorPool.add_actor_back_to_pool = add_actor_back_to_pool  # type: ignore[method-assign]
