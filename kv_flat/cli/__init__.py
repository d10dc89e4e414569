# SPDX-License-Identifier: Apache-2.0
"""The command ``tokenspeed-plugin kv-map``."""

from tokenspeed_plugin.kv_flat.cli.commands import app

__all__ = ["app"]
