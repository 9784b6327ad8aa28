# SPDX-License-Identifier: Apache-2.0
"""Membership of an elastic job, as pure state machines: the supervisor's scheduler, one agent on
each host, and the member in each rank. They hold no thread, socket, process or clock;
tests/simulation/elastic.py runs them through lost messages, deaths and split networks.

Every message holds the sender's whole state and is sent repeatedly. So a message may be lost,
late or repeated.

States of a rank, as Member keeps them:

    state       condition: next state
    new         its program calls init(): waiting
    waiting     the newest world has it as a member and is later than `over`: training
    training    its call of train() has ended: finished
                its world is broken, or all members agreed to meet: waiting
                the job must leave, after the next commit: ended
    finished    `View.done` counts its call: training (the world goes on); or a new world: training

States of the job, as Scheduler keeps them:

    state       condition: next state
    no world    enough workers wait: a world
    a world     a member ended or waits: over
    over        all members that live wait: the next world; or all have finished: a world, done + 1
    ending      (failure, leave, or a worker ended well) no worker lives: outcome

A world starts from the newest commit that a waiting worker has in memory; if none has one, from
the commit on the disk. The scheduler's state is in memory only: when the supervisor dies, its
agents end their ranks, and the next command starts from the commit on the disk.
"""
