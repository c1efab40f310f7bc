# SPDX-License-Identifier: Apache-2.0
"""Workers in memory that follow a script, with a fake clock."""

from __future__ import annotations

import contextlib

from ejkernel.ops.autotuner.process import worker as workers
from ejkernel.ops.autotuner.process.messages import Message, carried_out, pickled, pickled_answer, unpickled
from ejkernel.ops.autotuner.process.supervisor import Signs, Supervisor, WorkerDiedError
from ejkernel.ops.autotuner.process.watch import Instruction


def killed(signal="SIGABRT"):
    """The end of a worker."""
    return WorkerDiedError(f"the worker was killed by {signal}")


class FakeWorker(Supervisor):
    """A worker that takes the next step of its script each time that its supervisor waits for it.

    A step is a message, bytes of any content, the seconds of a pause, signs of life, the error of a transport, or a
    function that returns a message's bytes or `None`. After the script, the worker runs its request in this process.
    """

    def __init__(self, *script, environ=None):
        self.now = 0.0
        super().__init__(clock=lambda: self.now)
        self.script, self.environ = list(script), environ
        self.requests, self.instructions, self.seen = [], [], Signs()
        self.is_alive = True

    def post(self, request):
        self.requests.append(unpickled(request))

    def receive(self):
        if not self.is_alive:
            raise killed("SIGKILL")
        if not self.script:
            return pickled_answer(carried_out(pickled(self.requests[-1])))
        match self.script.pop(0):
            case bytes() as data:
                return data
            case Message() as message:
                return pickled(message)
            case float() as seconds:
                self.now += seconds
            case Signs() as signs:
                self.seen = signs
            case WorkerDiedError() as death:
                self.is_alive = False
                raise death
            case function:
                return function()
        return None

    def signs(self):
        return self.seen

    def tell(self, instruction):
        if self.instructions[-1:] != [instruction]:
            self.instructions.append(instruction)
        if instruction == Instruction.END_AT_ONCE:
            self.kill()

    def kill(self, *, wait=True):
        self.is_alive = False

    def close(self):
        self.is_alive = False


@contextlib.contextmanager
def only(monkeypatch, *script_of_each, started=None):
    """Inside the block, the default worker of this process is the next fake worker."""
    started = [] if started is None else started
    scripts = list(script_of_each)

    def make():
        started.append(FakeWorker(*scripts.pop(0)))
        return started[-1]

    session = workers._Session()
    session.first = workers.WorkerSlot(make)
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_session", session)
        yield started
