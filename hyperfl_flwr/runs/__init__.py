"""The folder of a run: records, checkpoints, manifest, summary, figures."""
