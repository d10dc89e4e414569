# SPDX-License-Identifier: Apache-2.0
"""What a plan costs: bytes on a ring, time from a measured or estimated table."""

from tokenspeed_plugin.placement.cost.cost_model import CostModel
from tokenspeed_plugin.placement.cost.cost_table import CostTable, LinkCost, LinkCurve, Sample, measured_link

__all__ = ["CostModel", "CostTable", "LinkCost", "LinkCurve", "Sample", "measured_link"]
