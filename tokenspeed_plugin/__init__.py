# SPDX-License-Identifier: Apache-2.0
"""Components for agentic traffic that plug into an unmodified vLLM, each switched on by its own flag."""

__version__ = "0.1.0"
