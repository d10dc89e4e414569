# SPDX-License-Identifier: Apache-2.0
"""Request state machine and scheduling policy (C++), and the adapter to the SchedulerInterface of vLLM."""
