"""Runs environment files, each in a process forked from this one, which has imported what they all
import.

    python launcher.py    # a line of JSON in, {"argv": [...], "cwd": ..., "log": ..., "environ": {...}, "rows": {...}}:
                          # {"started": pid} out, and {"ended": pid, "status": ...} when it has ended

The imports take ten seconds of a processor, and the file itself a few tenths. The child is as if
the file had been started by itself: its own process group, folder, variables, arguments, output and
seeds.
"""

import importlib
import json
import os
import runpy
import selectors
import signal
import sys

import offline

HEAVY = (
    "numpy",
    "datasets",
    "transformers",
    "openai",
    "pydantic",
    "aiohttp",
    "tqdm.asyncio",
    "wandb",
    "math_verify",
)


def say(message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def become(order):
    """In the child: run the file to its end."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(order["cwd"])
    os.environ.update(order["environ"])
    sys.argv[:] = order["argv"]
    sys.path[0] = os.path.dirname(order["argv"][0])
    offline.replace_load_dataset(order["rows"])
    offline.replace_hub(order["hub"])
    offline.start_all_seeds()
    runpy.run_path(order["argv"][0], run_name="__main__")


def main():
    for name in (*HEAVY, "atroposlib.envs.base"):
        importlib.import_module(name)
    inward, outward = os.pipe()
    os.set_blocking(inward, False)
    os.set_blocking(outward, False)
    signal.set_wakeup_fd(outward)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(inward, selectors.EVENT_READ)
    say({"ready": os.getpid()})
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                pid = os.fork()
                if pid == 0:
                    become(json.loads(line))
                    return
                say({"started": pid})
            else:
                os.read(inward, 4096)
                reap()


def reap():
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        say({"ended": pid, "status": os.waitstatus_to_exitcode(status)})


main()
