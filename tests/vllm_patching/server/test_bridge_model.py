"""Random faults done to a bridge's trainers, engine and watchdog: nothing wrong is ever sampled, or
called serving.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.virtual_time import virtual_time
from tests.vllm_patching.server.bridge_world import CLOCKED, POINTS, STEPS, TIMEOUT, Trainer, World
from tests.vllm_patching.server.fake_engine import Fault
from vllm_patching.server.state import Phase

KINDS = ("single_copy", "follows", "direct", "overlapped")
FATES = st.just(("", "")) | st.tuples(
    st.sampled_from(POINTS), st.sampled_from(["stopped", "killed"])
)
SOON = st.sampled_from([0.1, 0.6, 1.3 * TIMEOUT])
FAULTS = ("slow", "fails before", "fails after")


class BridgeModel(RuleBasedStateMachine):
    """A server and its trainers, between which time passes and faults happen.

    The invariants are in World.look.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.loop = self.stack.enter_context(virtual_time(*CLOCKED))

    @initialize(ranks=st.integers(1, 2))
    def open(self, ranks: int) -> None:
        self.world = World(self.loop, self.folder, ranks)

    @property
    def living(self) -> list[Trainer]:
        return [trainer for trainer in self.world.trainers.values() if not trainer.killed]

    def pick(self, which: int) -> Trainer:
        return self.living[which % len(self.living)]

    @rule(seconds=st.sampled_from([0.05, 0.2, 0.5, 1.0, TIMEOUT, 1.7 * TIMEOUT]))
    def time_passes(self, seconds: float) -> None:
        self.world.run(seconds)

    @precondition(lambda self: len(self.living) < 3)
    @rule(kind=st.sampled_from(KINDS), fate=FATES, seconds=SOON)
    def a_trainer_comes(self, kind: str, fate: tuple[str, str], seconds: float) -> None:
        trainer = Trainer(self.world, kind)
        trainer.fate = fate
        trainer.begin()
        self.world.run(seconds)

    @precondition(lambda self: any(not trainer.busy for trainer in self.living))
    @rule(fate=FATES, seconds=SOON)
    def a_trainer_updates(self, fate: tuple[str, str], seconds: float) -> None:
        trainer = next(trainer for trainer in self.living if not trainer.busy)
        trainer.fate = fate
        trainer.begin()
        self.world.run(seconds)

    @precondition(lambda self: bool(self.living))
    @rule(which=st.integers(0, 2), seconds=st.sampled_from([0.0, 0.1, 1.2 * TIMEOUT]))
    def a_trainer_is_stopped(self, which: int, seconds: float) -> None:
        self.pick(which).stop()
        self.world.run(seconds)

    @precondition(lambda self: any(not trainer.awake.is_set() for trainer in self.living))
    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5]))
    def a_trainer_goes_on(self, seconds: float) -> None:
        next(trainer for trainer in self.living if not trainer.awake.is_set()).go_on()
        self.world.run(seconds)

    @precondition(lambda self: bool(self.living))
    @rule(which=st.integers(0, 2))
    def a_trainer_is_killed(self, which: int) -> None:
        self.pick(which).kill()

    @precondition(lambda self: bool(self.living))
    @rule(which=st.integers(0, 2), how=st.sampled_from(["fails to write", "announces others"]))
    def a_trainer_errs(self, which: int, how: str) -> None:
        self.pick(which).spoil = how

    @precondition(lambda self: bool(self.living))
    @rule(which=st.integers(0, 2), step=st.sampled_from(["init", *STEPS]))
    def an_answer_is_lost(self, which: int, step: str) -> None:
        self.pick(which).lose_answer = step

    @precondition(
        lambda self: any(trainer.epoch == self.world.server.state.epoch for trainer in self.living)
    )
    @rule(seconds=st.sampled_from([0.0, 0.6, 1.3 * TIMEOUT]))
    def the_trainer_puts_it_in_quarantine(self, seconds: float) -> None:
        """Also in the middle of an update, which it then finishes if it is allowed to."""
        trainer = next(
            trainer for trainer in self.living if trainer.epoch == self.world.server.state.epoch
        )
        asked = self.loop.create_task(trainer.quarantine("it is late"))
        self.world.requests.add(asked)
        asked.add_done_callback(self.world.note_request)
        self.world.run(seconds)

    @precondition(lambda self: any(not trainer.busy and trainer.cohort for trainer in self.living))
    @rule()
    def a_cohort_changes(self) -> None:
        """The next update goes over another one."""
        next(trainer for trainer in self.living if not trainer.busy and trainer.cohort).cohort = ""

    @precondition(lambda self: any(not trainer.busy for trainer in self.living))
    @rule(times=st.integers(2, 3), fate=FATES)
    def updates_follow_each_other(self, times: int, fate: tuple[str, str]) -> None:
        """One after the other, also where the one before was given up."""
        trainer = next(trainer for trainer in self.living if not trainer.busy)
        trainer.fate = fate
        for _ in range(times):
            if not trainer.busy and not trainer.killed:
                trainer.begin()
            self.world.run(1.0)

    @rule(
        kind=st.sampled_from(FAULTS),
        seconds=st.sampled_from([0.9 * TIMEOUT, 1.1 * TIMEOUT, 2 * TIMEOUT]),
    )
    def a_command_of_the_engine_goes_wrong(self, kind: str, seconds: float) -> None:
        self.world.core.faults.append(Fault(kind, seconds))

    @rule(seconds=st.sampled_from([0.5, 0.9 * TIMEOUT, 1.2 * TIMEOUT, 2.5 * TIMEOUT]))
    def the_engine_is_stuck(self, seconds: float) -> None:
        """One that is stuck already is so until the later of both times."""
        self.world.core.stalled_until = max(self.world.core.stalled_until, self.world.now + seconds)

    @rule(seconds=st.sampled_from([0.9 * TIMEOUT, 1.2 * TIMEOUT, 2.5 * TIMEOUT]))
    def the_engine_is_not_heard(self, seconds: float) -> None:
        self.world.core.mute_until = max(self.world.core.mute_until, self.world.now + seconds)

    @rule(seconds=st.sampled_from([0.6, TIMEOUT]))
    def the_watchdog_errs(self, seconds: float) -> None:
        self.world.watchdog_fails = True
        self.world.run(seconds)
        self.world.watchdog_fails = False

    @invariant()
    def nothing_wrong_is_served(self) -> None:
        if hasattr(self, "world"):
            self.world.look()
            self.world.check_tokens()

    def teardown(self) -> None:
        """When the faults are over the server knows where it is, and the next trainer is welcome."""
        try:
            if hasattr(self, "world"):
                self.come_to_rest()
        finally:
            self.stack.close()

    def come_to_rest(self) -> None:
        world, state = self.world, self.world.server.state
        world.core.faults.clear()
        world.run_until(
            lambda: (
                world.now > max(world.core.stalled_until, world.core.mute_until)
                and not world.core.busy
            ),
            20 * TIMEOUT,
        )
        for trainer in self.living:
            trainer.fate = ("", "")
            trainer.go_on()
        world.run_until(lambda: not any(trainer.busy for trainer in self.living), 20 * TIMEOUT)
        for trainer in self.living:
            trainer.kill()
        world.run_until(lambda: not state.in_update and not state.undecided, 20 * TIMEOUT)
        for kind in ("single_copy", "direct", "overlapped"):
            last = Trainer(world, kind)
            for _ in range(3):  # what the server still does for an earlier one may take its time
                last.begin()
                world.run_until(lambda one=last: not one.busy, 10 * TIMEOUT)  # type: ignore[misc]
                if last.version:
                    break
            assert last.log[-1] == "served 1", last.log
            assert (state.phase, world.server.trouble()) == (Phase.SERVING, "")
        world.run(1.0)
        world.check_tokens()
        self.loop.run_until_complete(world.server.stop())


TestBridgeModel = BridgeModel.TestCase
TestBridgeModel.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
