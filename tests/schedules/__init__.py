# SPDX-License-Identifier: Apache-2.0
"""Training jobs to which things happen at random moments: kills, stops and hangs of ranks, launcher
and supervisor, and a wire between the hosts that does harm.

`schedule` draws what happens from a seed, `training` says what is trained, `program` trains it,
`run` starts a job and does to it what the schedule says, `verdict` judges how it has ended.
"""
