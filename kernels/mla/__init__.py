# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: one file or folder per solution, `reference` first."""
