# SPDX-License-Identifier: Apache-2.0
"""Who belongs to an elastic job: the supervisor's, the agents' and the ranks' decisions, as pure
state machines. No thread, socket, process or clock is in here; tests/simulation/elastic.py drives
them through lost messages, deaths and split networks.

Supervisor and agents tell each other all they know, again and again, instead of what has changed:
so a message may be lost, come late or come twice. A world is decided when all living members of the
last one wait (`Standing.away`); then the agents hear of it. The supervisor keeps its decisions in
memory only: when it dies, its agents end their ranks, and the next one starts from the commit on
the disk.
"""
