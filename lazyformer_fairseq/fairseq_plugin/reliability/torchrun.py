"""torchrun, with its options, for preempted runs: ``python -m`` this module.

torchrun itself dies of SIGUSR1 and leaves its processes behind; gives them 30 s after a SIGTERM, then exits with 1
whatever their exit codes; restarts them though they meant to stop, or though the user must first fix something; and
prints a page after their one line. This one forwards signals and exits as the processes did: with 75 for a preempted
run (see ``preemption``), with 130 after Ctrl-C, with 1 for a user's mistake, without another try.

Use it with ``--rdzv-backend c10d``: with the static one, processes that are started again find the addresses of those
that died (pytorch issue 135712).
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
    """Agent of one node, which starts its processes, and restarts all if one dies.

    Attributes:
        signalled: one of SIGNALS, when it has come; 0 until then.
    """

    signalled = 0

    def _start_workers(self, worker_group):
        started = super()._start_workers(worker_group)  # takes SIGTERM for itself
        for number in SIGNALS:
            signal.signal(number, self._forward)
        if Agent.signalled:  # while there were no processes to tell
            self._forward(Agent.signalled, None)
        return started

    def _forward(self, number: int, frame) -> None:
        Agent.signalled = number
        self._remaining_restarts = 0
        for pid in self._pcontext.pids().values():
            with suppress(ProcessLookupError):  # it is over, and will be noticed
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
                    f"process {rank} ended with {ending(failure)}; all start again from the last checkpoint, "
                    f"restart {start} of {worker_group.spec.max_restarts}",
                    file=sys.stderr,
                )
        return result


def ending(failure: ProcessFailure) -> str:
    """Return the signal or the exit code that ended a process."""
    if failure.exitcode < 0:
        return failure.signal_name()
    return f"exit code {failure.exitcode}"


def main(arguments: list[str]) -> int:
    """Run torchrun with these arguments; return the exit code."""
    api.LocalElasticAgent = Agent
    os.environ[FORWARDED] = str(os.getpid())
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # see above: the same with c10d, if it is shared
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # how each one ended
    options = parse_args(arguments)
    try:
        with TemporaryDirectory(prefix="lazyformer_", ignore_cleanup_errors=True) as folder:
            options.log_dir = options.log_dir or folder  # torch leaves a folder of its own behind
            run(options)
    except ChildFailedError as error:
        failures = error.failures.values()
        codes = {failure.exitcode for failure in failures}
        if Agent.signalled:  # it ends a process that has nothing to save yet, and the second Ctrl-C any
            codes |= {INTERRUPTED if -code == signal.SIGINT else EXIT_CODE for code in codes if -code in SIGNALS}
        if preempted := codes & {INTERRUPTED, EXIT_CODE}:
            return max(preempted)
        if not any(failure.message == command_line.USER_ERROR for failure in failures):
            rank, first = error.get_first_failure()
            print(f"error: process {rank} ended with {ending(first)}; its own output says why", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
