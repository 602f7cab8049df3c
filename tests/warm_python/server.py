"""Has imported what is heavy, and forks a process for each client: that takes milliseconds instead of seconds.

``server.py SOCKET STAND_IN``: prints a line when it is ready, and ends when its standard input does. It imports
libraries of others alone. fairseq and the package are imported by each process for itself, when python would do so.
"""

import atexit
import importlib
import json
import os
import random
import runpy
import select
import signal
import site
import socket
import sys
import tempfile
import threading
import types
from contextlib import suppress

from forkserver import fork_the_forkserver

HEAVY = (
    *("torch", "torch._dynamo", "torch.distributed.run", "torch.utils.flop_counter", "sklearn.metrics", "scipy.stats"),
    *("hydra", "sacrebleu", "sacremoses", "sentencepiece", "safetensors"),
)


def serve(path: str) -> tuple[dict, list[int]]:
    """Returns in the forked processes alone, each with what it is to run and its standard files."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        if 0 in select.select([0, listener], [], [])[0]:  # whoever started the server has ended
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return fork_for(client)
        client.close()


def fork_for(client: socket.socket) -> tuple[dict, list[int]]:
    """Stays beside the process that a client wants: tells the client its id and its end, and ends both together."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, files, *_ = socket.recv_fds(client, 8, 3)
    job = json.loads(client.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
    if (pid := os.fork()) == 0:
        client.close()
        return job, files
    for file in (0, 1, *files):
        os.close(file)
    client.sendall(pid.to_bytes(8, "big"))
    process = os.pidfd_open(pid)
    if process not in select.select([process, client], [], [])[0]:
        os.kill(pid, signal.SIGKILL)  # the client was killed: it says nothing else
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        client.sendall(status.to_bytes(8, "big"))
    os._exit(0)


def become(stand_in: str, files: list[int], environment: dict[str, str], folder: str, unbuffered: bool) -> None:
    """Makes this process what python is at its start."""
    os.setsid()  # Ctrl-C in a terminal reaches the client, which hands it on
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    unbuffered = unbuffered or bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)
    tempfile.tempdir = None  # the environment's
    for generator in (random, sys.modules["numpy"].random):
        generator.seed()
    sys.executable = stand_in
    paths = environment.get("PYTHONPATH", "")
    sys.path[:1] = paths.split(os.pathsep) if paths else []
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()


def run(words: list[str]) -> None:
    """``-m MODULE``, ``-c CODE`` or a file, with its arguments."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def exit_code(words: list[str]) -> int:
    """Runs them, and prints what python would if they fail."""
    try:
        run(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def leave(code: int) -> None:
    """As python ends, but without taking apart everything that was imported: that would take half a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for name in HEAVY:
        with suppress(ModuleNotFoundError):  # sacrebleu comes with fairseq
            importlib.import_module(name)
    fork_the_forkserver()
    job, files = serve(sys.argv[1])
    become(sys.argv[2], files, job["environment"], job["folder"], job["unbuffered"])
    leave(exit_code(job["words"]))
