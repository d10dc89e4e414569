# SPDX-License-Identifier: Apache-2.0
"""The command group ``tokenspeed-plugin placement``."""

from tokenspeed_plugin.placement.cli.commands import app

__all__ = ["app"]
