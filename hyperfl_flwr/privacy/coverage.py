"""Name accountants, and what a stated epsilon does not cover: the words of every place that prints one."""

ACCOUNTANTS = {"local": "analytic Gaussian", "server": "analytic Gaussian", "sum": "zero-concentrated"}
"""Accountants of the client level, by where the noise is added; see `hyperfl_flwr.privacy.accounting`."""

RECORD_ACCOUNTANT = "privacy loss distributions"
"""Accountant of the record level."""

WEIGHT_ACCOUNTANT = "sum over the weights"
"""Accountant of randomised response of each weight."""

PROMISES_NOTHING = "an epsilon above a few tens promises nothing"
"""What is printed next to the epsilon of all weights together."""

NEVER_COVERED = (
    "metrics and numbers of samples",
    "who takes part, failures and times",
    "the choice of settings on the same data",
)
"""What no noise of this project covers."""

OWN_MODEL = "a client's own personalized model"
"""What no noise at client level covers."""

TRUSTED = {
    "local": (),
    "server": ("what the server sees, which adds the noise",),
    "sum": ("more colluding nodes than secagg.colluding and the owners' max-colluding",),
}
"""Who must be trusted at client level, by where the noise is added, as what is not covered."""
