# SPDX-License-Identifier: Apache-2.0
"""What Horovod's adapters have in common."""
