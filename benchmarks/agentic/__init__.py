# SPDX-License-Identifier: Apache-2.0
"""Agentic traffic from traces: simulated on real schedulers, replayed against servers, reported."""
