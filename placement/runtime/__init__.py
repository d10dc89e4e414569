# SPDX-License-Identifier: Apache-2.0
"""Executes plans on one rank: real modules, real process groups."""

from tokenspeed_plugin.placement.runtime.communicator import Communicator, TorchCommunicator
from tokenspeed_plugin.placement.runtime.compiled_layer import CompiledDecoderLayer, Module
from tokenspeed_plugin.placement.runtime.planned_model import PlannedModel

__all__ = ["Communicator", "CompiledDecoderLayer", "Module", "PlannedModel", "TorchCommunicator"]
