"""Light vLLM servers for tests of a fleet. They have the bridge's own controller, routes, worker
extension and updater thread. The model has a few hundred numbers, and the engine steps and samples
nothing.

python -m tests.fleet_server            reads lines of JSON from stdin, and answers each with one:

    {"do": "start", "port": 9001, "folder": "/tmp/x", "timeout": 20}  → {"pid": 123}     forked from this process
    {"do": "train", …}                                                 → {"pid": 123}     see tests/fleet_trainer.py
    {"do": "parameter server", "arguments": ["--port", …], "folder": …} → {"pid": 123}
                 with "environment", and "dies": push begins, push ends or pull: where it kills itself
    {"do": "grpo", "arguments": [...], "folder": "/tmp/x", "dies": "comparing", "passes": 3}
                 the trainer itself; it kills itself when it has come to a place of DEATHS so often
    {"do": "signal", "pid": 123, "number": 9}                          → {}
    {"do": "wait", "pid": 123}                                         → {"status": -9}   when it has ended

`start` may also name the `address` of the server, the bytes of a `bucket`, and its `model` (a
folder with a config.json). It may name its `device`, its `dtype` and its report of `deterministic`
mode. A server that `samples` is in that mode (tests/exact_sampler.py). With `colocate` it takes
turns with its trainer.

A started server answers, beside the bridge's routes, GET /test with what its engine has seen. It
also answers POST /test/fault {"at": cohort | begin | receive | commit, "do": kill | stop | lie |
slow}. That happens to it when it comes there next. One that was started `traced` also answers POST
/test/trip: the files that its calls have entered since the last such answer. Weights of version v
are v everywhere, so a step that sees two numbers has seen a mixture.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import types
from contextlib import nullcontext
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
from fastapi import Body

from bench.call_trip import Trip
from example_trainer.child_processes.guard import PR_SET_PDEATHSIG, prctl
from example_trainer.parameter_server.held import module_of
from example_trainer.parameter_server.receiving import StillEngine
from tests.geometries import config_of
from vllm_patching.weights.families import Geometry
from vllm_patching.weights.sharding import plan_shards

CONFIG = config_of("Qwen3", 1, 12, 8, 4, 2, 3, 70, tie_word_embeddings=True)
STEP_SECONDS = 0.05
FAULT_PLACES = ("cohort", "begin", "receive", "commit")


def take_shapes_of(folder: Path) -> None:
    """Have servers and trainers of this process the parameters of the model in a folder."""
    global CONFIG
    CONFIG = json.loads((folder / "config.json").read_text())


def tiny_model(
    full: bool, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """Parameters as vLLM has them at tensor-parallel degree 1, or (`full`) as the trainer has them."""
    plan = plan_shards(Geometry.from_config(CONFIG), 0, 1)
    shapes = {spec.name: spec.full_shape if full else spec.shape for spec in plan}
    return module_of(
        {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    )


def _stand_in_for_vllm() -> None:
    """The few names of vLLM's that the worker extension looks up; the real one takes long to
    import.
    """

    def module(name: str, **contents: Any) -> None:
        sys.modules[name] = made = types.ModuleType(name)
        vars(made).update(contents)

    for name in (
        "vllm",
        "vllm.model_executor",
        "vllm.model_executor.layers",
        "vllm.model_executor.model_loader",
        "vllm.v1",
        "vllm.v1.worker",
    ):
        module(name, __version__="0.0", __path__=[])
    module(
        "vllm.platforms",
        current_platform=SimpleNamespace(is_cuda=bool, is_cpu=lambda: True, is_cuda_alike=bool),
    )
    module("vllm.model_executor.layers.utils", dispatch_cpu_unquantized_gemm=None)
    loading = "vllm.model_executor.model_loader.base_loader"
    module(loading, process_weights_after_loading=lambda *_: None)
    runner = SimpleNamespace(_sample=None, _bookkeeping_sync=None)
    module("vllm.v1.worker.gpu_model_runner", GPUModelRunner=runner)


class Fault:
    """The next fault, and its place."""

    def __init__(self) -> None:
        self.at = self.do = ""

    def come_to(self, place: str) -> str:
        """Carry the fault out if it is of this place. Returns what the caller has to do itself."""
        if self.at != place:
            return ""
        done, self.at = self.do, ""
        if done == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif done == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return done


def _worker(fault: Fault, device: str, dtype: torch.dtype) -> Any:
    """A worker of one rank, with the project's extension."""
    from vllm_patching.worker import extension
    from vllm_patching.worker.model_layout import learn_while_loading

    extension.tensor_parallel = lambda: (0, 1)  # type: ignore[assignment]

    class Worker(extension.LockstepWorkerExtension):
        def __init__(self) -> None:
            self.model = tiny_model(False, device, dtype)
            families = CONFIG["architectures"]
            checkpoint = SimpleNamespace(to_dict=lambda: CONFIG, architectures=families)
            config = SimpleNamespace(hf_config=checkpoint)
            with learn_while_loading(self.model, config):
                """A mixture's experts stay as they are, as with vLLM's Triton kernels."""
            parallel = SimpleNamespace(data_parallel_index=0, data_parallel_size=1)
            self.vllm_config = SimpleNamespace(model_config=config, parallel_config=parallel)
            self.direct, self.spoilt, self.received_before = False, -1, None
            # The memory that a server which takes turns gives away and has again.
            self.keys_and_values = torch.ones(1024)
            self.model_runner = SimpleNamespace(kv_caches=[self.keys_and_values])

        def get_model(self) -> torch.nn.Module:
            return self.model

        def execute_model(self) -> None:
            return None

        def lockstep_cohort(self, order: Any) -> None:
            fault.come_to("cohort")
            super().lockstep_cohort(order)

        def lockstep_receive(self, version: int) -> None:
            self.spoilt = -1
            fault.come_to("begin")
            super().lockstep_receive(version)

        def lockstep_check(self) -> dict[str, Any]:
            told = super().lockstep_check()
            return {**told, "checksum": "falsified"} if fault.come_to("commit") == "lie" else told

        def lockstep_aim(self, direct: bool) -> None:
            self.direct = direct
            super().lockstep_aim(direct)

        def lockstep_status(self, patience: float = 0.0) -> dict[str, Any]:
            told = super().lockstep_status(patience)
            if (
                self.direct
                and told["phase"] == "received"
                and told["version"] != self.received_before
            ):
                if fault.come_to("commit") == "lie":
                    self.spoilt = told["version"]
                if self.spoilt == told["version"]:  # any caller
                    told["checksum"] = "falsified"
            return told

    return Worker()


def _receive_faultily(fault: Fault) -> None:
    """Have the updaters of this process come to the fault's place when they receive."""
    from vllm_patching.worker import receiving

    receive = receiving.WeightUpdater._receive

    def receive_faultily(self: Any, command: Any) -> None:
        if fault.come_to("receive") == "slow":
            time.sleep(fault_seconds())
        receive(self, command)

    receiving.WeightUpdater._receive = receive_faultily  # type: ignore[method-assign]


def fault_seconds() -> float:
    """Seconds of something slow: more than the patience of tests/fleet_trainer.py."""
    return float(os.environ.get("FLEET_SLOW_SECONDS", "20"))


class Engine(StillEngine):
    """vLLM's AsyncLLM with one worker, which steps while nothing pauses it."""

    def __init__(self, worker: Any) -> None:
        super().__init__(lambda method, args: [getattr(worker, method)(*args)], self._go_on)
        self.paused = False
        self.mixtures: list[str] = []
        self.steps: dict[str, int] = {}
        self.model_config = SimpleNamespace(logprobs_mode="processed_logprobs")
        self._worker = worker
        self._stepping = asyncio.get_running_loop().create_task(self._run())

    def _go_on(self) -> None:
        self.paused = False

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.paused = True
        await super().pause_scheduler_async(mode, clear_cache)  # behind the step that is under way

    async def resume_generation(self) -> None:
        self.paused = False

    async def _run(self) -> None:
        while True:
            if not self.paused:
                await self.on_main(self._step)
            await asyncio.sleep(STEP_SECONDS)

    def _step(self) -> None:
        if self.paused:
            return
        if not self._worker.keys_and_values.untyped_storage().nbytes():
            self.mixtures.append("a step had no memory for keys and values")
        seen = {
            float(value) for p in self._worker.model.parameters() for value in (p.min(), p.max())
        }
        seen.discard(0.0) if len(seen) > 1 else None  # padding
        if len(seen) > 1:
            self.mixtures.append(f"a step saw {sorted(seen)}")
        else:
            key = f"{seen.pop():g}"
            self.steps[key] = self.steps.get(key, 0) + 1


def _add_test_routes(
    app: Any, engine: Engine, worker: Any, fault: Fault, trip: Trip | None
) -> None:
    @app.get("/test")
    async def seen() -> dict[str, Any]:
        return {"mixtures": engine.mixtures, "steps": engine.steps, "paused": engine.paused}

    @app.post("/test/fault")
    async def set_fault(body: Annotated[dict[str, str], Body()]) -> dict[str, Any]:
        assert body["at"] in FAULT_PLACES, body
        fault.at, fault.do = body["at"], body["do"]
        worker.received_before = worker._lockstep_updater.status.version
        return {}

    @app.post("/test/trip")
    async def take_trip() -> list[str]:
        assert trip is not None, "start it traced"
        files = sorted(trip.files)
        trip.files.clear()
        return files


async def _serve(
    port: int,
    folder: Path,
    timeout: float,
    address: str = "127.0.0.1",
    device: str = "cpu",
    dtype: str = "float32",
    trip: Trip | None = None,
    deterministic: dict[str, Any] | None = None,
    samples: bool = False,
    colocate: bool = False,
) -> None:
    import uvicorn
    from fastapi import FastAPI

    from vllm_patching.server.bridge import BridgeController
    from vllm_patching.server.routes import LockstepService, make_router
    from vllm_patching.server.state import VersionSpans

    if (place := torch.device(device)).type == "cuda":
        torch.cuda.set_device(place)  # as vLLM's worker does
    fault = Fault()
    _receive_faultily(fault)
    worker = _worker(fault, device, getattr(torch, dtype))
    engine = Engine(worker)
    service = LockstepService()
    spans = VersionSpans()
    bridge = BridgeController(engine, "tiny", dtype, timeout, folder, spans, port=port)
    await bridge.start()
    if colocate:
        await bridge.turns.open()
    service.engine, service.bridge = engine, bridge
    service.deterministic = deterministic
    service.weights = lambda: (bridge.state.weight_version, bridge.state.weight_epoch)
    app = FastAPI()
    app.include_router(make_router(service))
    if samples:
        from tests.exact_sampler import add_sampling

        add_sampling(app, service, engine, worker.model, CONFIG)

    _add_test_routes(app, engine, worker, fault, trip)
    server = uvicorn.Server(uvicorn.Config(app, address, port, log_level="warning"))
    await server.serve()


def _log_into(path: Path) -> None:
    os.setsid()  # a signal to the tests' group is none to it
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr
    )
    torch.set_num_threads(1)


def _be_server(told: dict[str, Any]) -> None:
    path = Path(told["folder"])
    _log_into(path / f"server-{told['port']}.log")
    os.environ["LOGDIR"] = str(path)
    if model := told.get("model"):
        take_shapes_of(Path(model))
    if bucket := told.get("bucket"):
        from vllm_patching.worker import receiving

        updater = receiving.WeightUpdater
        updater.__init__ = partialmethod(updater.__init__, bucket_bytes=bucket)  # type: ignore[assignment]
    names = ("address", "device", "dtype", "deterministic", "samples", "colocate")
    chosen = {key: told[key] for key in names if key in told}
    trip = Trip() if told.get("traced") else None
    with trip.traced() if trip is not None else nullcontext():
        asyncio.run(_serve(told["port"], path, told["timeout"], trip=trip, **chosen))


def _be_trainer(told: dict[str, Any]) -> None:
    from tests import fleet_trainer

    _log_into(Path(told["folder"]) / f"trainer-{os.getpid()}.log")
    fleet_trainer.run(told)
    os._exit(0)


def _be_parameter_server(told: dict[str, Any]) -> None:
    from example_trainer.command_line import parse_section
    from example_trainer.parameter_server.held import HeldWeights
    from example_trainer.parameter_server.options import ParameterServerOptions
    from example_trainer.parameter_server.serving import serve
    from example_trainer.process import run
    from example_trainer.weight_bridge.stream import WeightStream

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    _log_into(Path(told["folder"]) / "parameter-server.log")
    os.environ |= told.get("environment", {})
    dies = told.get("dies", "")
    if dies == "push begins":
        HeldWeights.lockstep_receive = die  # type: ignore[method-assign]
    elif dies == "push ends":
        die.__name__ = HeldWeights.held_accept.__name__  # by which the shards are asked
        HeldWeights.held_accept = die  # type: ignore[method-assign]
    elif dies == "pull":
        WeightStream.send = die  # type: ignore[method-assign,assignment]
    options = parse_section(ParameterServerOptions, "parameter_server", told["arguments"])
    os._exit(run(lambda stop: serve(options, stop)))


DEATHS = {
    "comparing": ("example_trainer.deterministic.parity", "ParityCheck.compare"),
    "sending": ("example_trainer.weight_bridge.stream", "WeightStream.send"),
    "resting": ("example_trainer.weight_bridge.turns", "Turns._rest"),
    "waking": ("example_trainer.weight_bridge.turns", "Turns._wake"),
    "committing": ("example_trainer.weight_bridge.server", "BridgeServer.commit"),
    "saving": ("example_trainer.training.checkpoints", "put_in_place"),
}
"""Place where a trainer may kill itself -> the function that it enters then."""


def _be_grpo(told: dict[str, Any]) -> None:
    """Run grpo.py, which may die in the middle of a step by SIGKILL."""
    from example_trainer import grpo
    from example_trainer.command_line import parse_config
    from example_trainer.process import run

    _log_into(Path(told["folder"]) / "trainer.log")
    if place := told.get("dies"):
        module, name = DEATHS[place]
        owner: Any = importlib.import_module(module)
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        real, left = getattr(owner, last), [int(told["passes"])]

        def counted(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(owner, last, counted)
    config = parse_config(told["arguments"])
    os._exit(run(lambda stop: grpo.train(config, stop)))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, of this id, has died, however that was."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # it died before the line above took effect


def main() -> None:
    """Start and signal servers and trainers, by commands line by line, until stdin ends; then they
    end too.

    They end however this process does: a person's Ctrl-C is a signal to it as well, and none to
    them.
    """
    me = os.getpid()
    prctl(
        PR_SET_PDEATHSIG, signal.SIGKILL
    )  # while it waits for a child it does not hear that stdin has ended
    _stand_in_for_vllm()
    # Imported once, before the servers part; what they would import as they serve, too.
    for module in ("server.bridge", "server.routes", "worker.extension", "worker.receiving"):
        importlib.import_module(f"vllm_patching.{module}")
    for module in (
        "pydantic.v1",
        "uvicorn.lifespan.on",
        "uvicorn.protocols.http.auto",
        "uvicorn.protocols.websockets.auto",
    ):
        importlib.import_module(module)
    roles = {
        "start": _be_server,
        "train": _be_trainer,
        "parameter server": _be_parameter_server,
        "grpo": _be_grpo,
    }
    children: set[int] = set()
    for line in sys.stdin:
        told = json.loads(line)
        answer: dict[str, Any] = {}
        if told["do"] in roles:
            if told["do"] == "parameter server":
                import example_trainer.parameter_server.serving  # noqa: F401 - as above

            pid = os.fork()
            if pid == 0:
                try:
                    die_with(me)
                    sys.stdin.close()
                    roles[told["do"]](told)
                except BaseException:
                    # into its log; the parent's frames are none of its business
                    traceback.print_exc()
                    raise
                finally:
                    os._exit(1)
            children.add(pid)
            answer = {"pid": pid}
        elif told["do"] == "wait":
            answer = {"status": os.waitstatus_to_exitcode(os.waitpid(told["pid"], 0)[1])}
            children.discard(told["pid"])
        elif told["pid"] in children:
            os.kill(told["pid"], told["number"])
            if told["number"] == signal.SIGKILL:
                os.waitpid(told["pid"], 0)
                children.discard(told["pid"])
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    assert threading.active_count() == 1, "a fork takes no threads along"
    main()
