# SPDX-License-Identifier: Apache-2.0
"""Lets the ranks of a job find each other, and leave the job."""
