# SPDX-License-Identifier: Apache-2.0
"""What one collective call consists of: arguments, submission to the core, memory and handle."""
