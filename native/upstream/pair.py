"""Two processes with NIXL's agents: an owner of memory, and readers that may end."""

import os
import select
import subprocess
import sys
import time

# NIXL logs to stdout, which is for the answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

LENGTH = 32 << 20
# The longest wait for a process's answer.
ANSWER_SECONDS = 60


def say(text):
    print(text, file=answers, flush=True)


def blocks(base, length, count):
    """Rows of address, length and device."""
    return np.array([[base + index * length, length, 0] for index in range(count)], dtype=np.uint64)


class Side:
    """An agent with memory."""

    def __init__(self, backend):
        self.agent = nixl_agent(f"upstream-{os.getpid()}", nixl_agent_config(backends=[backend]))
        self.memory = np.zeros(LENGTH, np.uint8)
        self.agent.register_memory(blocks(self.memory.ctypes.data, LENGTH, 1), "DRAM")

    def tell(self):
        say(f"{self.agent.get_agent_metadata().hex()} {self.memory.ctypes.data}")

    def begin_read(self, metadata, address, block=65536, count=512):
        """Posts a READ of the peer's memory."""
        peer = self.agent.add_remote_agent(bytes.fromhex(metadata))
        bases = (self.memory.ctypes.data, int(address))
        local, remote = (self.agent.get_xfer_descs(blocks(base, block, count), "DRAM") for base in bases)
        self.read = self.agent.initialize_xfer("READ", local, remote, peer)
        return self.agent.transfer(self.read)

    def wait(self, seconds):
        """The READ's state: DONE, ERR, or PROC when it lasts longer."""
        end = time.monotonic() + seconds
        state = "PROC"
        while state == "PROC" and time.monotonic() < end:
            state = self.agent.check_xfer_state(self.read)
        return state


class Process:
    """This program again, in another role."""

    def __init__(self, *arguments):
        command = [sys.executable, sys.argv[0], *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self):
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_SECONDS)
        if not ready:
            self.kill()
            sys.exit(f"the process did not answer within {ANSWER_SECONDS} s")
        line = self.process.stdout.readline()
        if line == "":
            sys.exit(f"the process ended: {self.process.wait()}")
        return line.split()

    def ask(self, question):
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.wait()


def judge(faulty, what):
    """Ends the program: 1 where the library has the fault."""
    say(("fault: " if faulty else "no fault: ") + what)
    answers.flush()
    # Agents whose calls do not return cannot be ended politely.
    os._exit(1 if faulty else 0)
