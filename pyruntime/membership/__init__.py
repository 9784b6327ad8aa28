# SPDX-License-Identifier: Apache-2.0
"""Decides the membership of an elastic job with pure state machines: the supervisor's scheduler, an
agent on each host, and a member in each rank. They contain no threads, sockets, processes or
clocks. tests/simulation/elastic.py tests them with lost messages, deaths and split networks.

Every message contains the sender's complete state and is sent repeatedly, so messages may be lost,
late or repeated.

States of a rank, kept by Member:

    state    | condition -> next state
    new      | the rank's program calls init() -> waiting
    waiting  | the rank is a member of the newest world, which is later than `over` -> training
    training | the rank's call of train() has ended -> finished
    training | the rank's world is broken, or all members agreed to meet -> waiting
    training | the job must leave, and the rank has made its next commit -> ended
    finished | `View.done` counts the rank's call, or there is a new world -> training

States of the job, kept by Scheduler:

    no world | enough workers wait -> a world
    a world  | a member has ended or waits -> over
    over     | all living members wait -> the next world
    over     | all members have finished the call -> the same world, done + 1
    ending   | (after a failure, a leave or a success) no worker lives -> the outcome

A world starts from the newest commit that a waiting worker has in memory. If no worker has one, it
starts from the commit on the disk. The scheduler keeps its state only in memory. If the supervisor
dies, agents end their ranks, and the next command starts from the commit on the disk.
"""
