# SPDX-License-Identifier: Apache-2.0
"""Launchers for tests: ranks under mpirun, and ranks without MPI; every wait has a deadline."""
