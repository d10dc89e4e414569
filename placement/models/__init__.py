# SPDX-License-Identifier: Apache-2.0
"""Declared model families and the registry that finds one for a configuration."""

from tokenspeed_plugin.placement.models.registry import declare, declared_architectures, register_declaration

__all__ = ["declare", "declared_architectures", "register_declaration"]
