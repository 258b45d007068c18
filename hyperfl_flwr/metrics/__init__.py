"""Metrics: accuracy and loss as mergeable sums, predictions, comparisons of images and distributions, memory."""
