# SPDX-License-Identifier: Apache-2.0
"""Collectives joined with what follows them, over peer memory of the GPUs of one host."""
