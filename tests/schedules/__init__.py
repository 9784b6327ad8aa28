# SPDX-License-Identifier: Apache-2.0
"""Training jobs to which things happen at random moments: kills, stops and hangs of ranks, launcher
and supervisor, and a wire between the hosts that does harm.

`schedule` draws what happens from a seed, `training` says what is trained, `program` trains it,
`job` starts the ranks, `run` does to them what the schedule says, `outcome` has what came of it,
and `verdict` judges that.
"""
