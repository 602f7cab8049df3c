"""A torchrun for preemptible runs, with the same options; start it with ``python -m`` and this module's name.

The original torchrun is killed by SIGUSR1 and leaves its processes behind. After a SIGTERM it allows them 30 seconds
and then exits with 1, whatever their exit codes are. It restarts processes that ended on purpose or because of a user
error, and it prints a page of text after the processes' error message. This version forwards signals and exits with the
processes' exit code: 75 for a preempted run (see ``preemption.py``), 130 after Ctrl-C, and 1, without a restart, after
a user error.

Use it with ``--rdzv-backend c10d``. With the static back end, restarted processes find the addresses of the dead ones
(pytorch issue 135712).
"""

import logging
import os
import signal
import sys
from contextlib import suppress
from tempfile import TemporaryDirectory

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api
from torch.distributed.run import parse_args, run

from lazyformer_fairseq.fairseq_plugin.reliability import command_line
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import FORWARDED
from lazyformer_fairseq.training.stop_signals import EXIT_CODE, INTERRUPTED, SIGNALS


class Agent(LocalElasticAgent):
    """A node's agent, which starts the node's processes and restarts all of them if one dies.

    Attributes:
        signalled: the most recent of the SIGNALS to arrive; 0 if none has.
    """

    signalled = 0

    def _start_workers(self, worker_group):
        started = super()._start_workers(worker_group)  # installs torch's own SIGTERM handler
        for number in SIGNALS:
            signal.signal(number, self._forward)
        if Agent.signalled:  # the signal arrived before there were processes to forward it to
            self._forward(Agent.signalled, None)
        return started

    def _forward(self, number: int, frame) -> None:
        Agent.signalled = number
        self._remaining_restarts = 0
        for pid in self._pcontext.pids().values():
            with suppress(ProcessLookupError):  # the process has ended, which torch detects by itself
                os.kill(pid, number)

    def _monitor_workers(self, worker_group):
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            meant_to = (EXIT_CODE, INTERRUPTED)
            failures = result.failures.values()
            if any(each.exitcode in meant_to or each.message == command_line.USER_ERROR for each in failures):
                self._remaining_restarts = 0
            if self._remaining_restarts:
                rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
                start = worker_group.spec.max_restarts - self._remaining_restarts + 1
                print(
                    f"process {rank} ended with {ending(failure)}; all processes restart from the last checkpoint, "
                    f"restart {start} of {worker_group.spec.max_restarts}",
                    file=sys.stderr,
                )
        return result


def ending(failure: ProcessFailure) -> str:
    """Describe how a process ended: a signal's name, or ``exit code`` and a number."""
    if failure.exitcode < 0:
        return failure.signal_name()
    return f"exit code {failure.exitcode}"


def main(arguments: list[str]) -> int:
    """Run torchrun with command-line arguments, and return the exit code."""
    api.LocalElasticAgent = Agent
    os.environ[FORWARDED] = str(os.getpid())
    # If c10d shared its store, it would have the same problem as the static back end.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # This logger reports how each process ended, which main does in one line.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    options = parse_args(arguments)
    try:
        with TemporaryDirectory(prefix="lazyformer_", ignore_cleanup_errors=True) as folder:
            options.log_dir = options.log_dir or folder  # torch would leave a temporary folder behind
            run(options)
    except ChildFailedError as error:
        failures = error.failures.values()
        codes = {failure.exitcode for failure in failures}
        # A signal kills a process that has nothing to save yet, and a second Ctrl-C kills any process.
        if Agent.signalled:
            killing_signals = {-code for code in codes if -code in SIGNALS}
            for number in killing_signals:
                codes.add(INTERRUPTED if number == signal.SIGINT else EXIT_CODE)
        if preempted := codes & {INTERRUPTED, EXIT_CODE}:
            return max(preempted)
        if not any(failure.message == command_line.USER_ERROR for failure in failures):
            rank, first = error.get_first_failure()
            print(f"error: process {rank} ended with {ending(first)}; see its output for the reason", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
