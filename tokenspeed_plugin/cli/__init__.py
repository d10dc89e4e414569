# SPDX-License-Identifier: Apache-2.0
"""The command `tokenspeed-plugin`."""

from tokenspeed_plugin.cli.app import main

__all__ = ["main"]
