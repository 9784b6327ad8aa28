# SPDX-License-Identifier: Apache-2.0
"""Random programs of strangers: what their ranks get is compared with a model in one process.

`program` and `loops` say what a program is, `strategies` draws them, `plan` gives every rank its
script, `reference` and `loop_reference` say what each must get, `rank` and `loop_rank` run it,
`zygote` and `world` keep the ranks, `again` runs one program by hand.
"""
