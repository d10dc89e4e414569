# SPDX-License-Identifier: Apache-2.0
"""The only place that touches vLLM's private names.

Importing this package imports nothing of vLLM, so an unsupported vLLM can never fail because of it. `host.check` says whether
the installed vLLM has what is relied on; `host.names` then imports the objects themselves.
"""
