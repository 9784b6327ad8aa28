# SPDX-License-Identifier: Apache-2.0
"""Processes that a script starts find horovod too, by multiprocessing or by themselves."""

import multiprocessing
import subprocess
import sys
import threading

import horovod

# Without torch, whose import is no part of this.
child_program = """
from horovod.common.basics import HorovodBasics
hvd = HorovodBasics(); hvd.init(); print(hvd.size(), hvd.Sum.name)
"""


class Answer:
    """Pickled by reference to __main__."""

    def __init__(self, text):
        self.text = text


def work(queue):
    from horovod.common.basics import HorovodBasics

    hvd = HorovodBasics()
    hvd.init()
    queue.put(Answer(f"child of size {hvd.size()}, {HorovodBasics.__module__}"))


def outlive():
    threading.main_thread().join()
    print("late:", Answer.__name__, horovod.__version__)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print(queue.get().text)
    child.join()
    print(subprocess.check_output([sys.executable, "-c", child_program], text=True).strip())
    threading.Thread(target=outlive).start()
    print("argv:", sys.argv[1:], __name__, threading.main_thread() is threading.current_thread())
    sys.exit(int(sys.argv[1]))
