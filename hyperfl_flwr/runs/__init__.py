"""A run's folder: records, checkpoints, manifest, summary, figures."""
