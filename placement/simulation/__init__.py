# SPDX-License-Identifier: Apache-2.0
"""Runs a plan on real tensors, all ranks in one process: shows on any machine that a plan computes the declared model."""

from tokenspeed_plugin.placement.simulation.batch import Batch
from tokenspeed_plugin.placement.simulation.executor import Simulation
from tokenspeed_plugin.placement.simulation.weights import random_weights

__all__ = ["Batch", "Simulation", "random_weights"]
