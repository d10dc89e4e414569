# SPDX-License-Identifier: Apache-2.0
"""What the KV manager's operations cost."""
