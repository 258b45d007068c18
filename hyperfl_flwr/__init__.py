"""Federated learning with hypernetworks and without sharing models, on Flower.

Ray puts the working directory of the simulation's process first on every actor's import path, so a foreign package
named `clients` or `strategies` there would be imported instead of ours. In that process, and only there, the working
directory is moved to the app's own folder. Every output path is therefore absolute.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The folder that holds this project's packages: the checkout, Flower's unpacked app, or site-packages."""

__version__ = "0.1.0"

if Path(sys.argv[0]).name == "flwr-simulation":
    os.chdir(ROOT)
