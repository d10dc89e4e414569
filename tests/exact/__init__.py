# SPDX-License-Identifier: Apache-2.0
"""The exact worker: a fake model runner whose tokens are right only if every block table it was given was right."""
