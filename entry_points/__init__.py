# SPDX-License-Identifier: Apache-2.0
"""What vLLM and the shell load: registration, flags, routes and statistics."""
