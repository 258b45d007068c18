"""The data of a run, which a process reads once, whatever happens to the files meanwhile."""

from functools import lru_cache

from hyperfl_flwr.data.federated_data import DataSettings, FederatedData, load_federated_data
from hyperfl_flwr.data.fewer_samples import most_samples


def data_of_run(settings: DataSettings, run: str) -> FederatedData:
    """Load data as `load_federated_data` does, the first time that a process needs them in a run.

    Without this, a file that is replaced during a run would be read at once, and half of the rounds would be trained on
    other data than the manifest names.

    Args:
        settings: See `DataSettings`.
        run: Id of the run; empty outside a run, where files that have been replaced are read again.

    Raises:
        DataError: If the data set cannot be loaded or is too small for the federation.
    """
    return _of_run(settings, run, most_samples()) if run else load_federated_data(settings)


@lru_cache(maxsize=8)
def _of_run(settings: DataSettings, _run: str, _most: int) -> FederatedData:
    return load_federated_data(settings)
