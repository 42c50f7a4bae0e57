"""The state machine: only the arrows of the design exist, versions only grow, and a mixture is never called healthy."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_patching.server.state import IN_UPDATE, BridgeConflict, BridgeState, Phase, UpdateGivenUp

UPDATE = [Phase.PREPARED, Phase.PAUSED, Phase.TRANSFERRED, Phase.COMMITTED, Phase.VERIFIED, Phase.SERVING]
OVERLAPPED = [Phase.PREPARED, Phase.TRANSFERRED, Phase.PAUSED, Phase.COMMITTED, Phase.VERIFIED, Phase.SERVING]
ORDERS = {"direct": UPDATE, "overlapped": OVERLAPPED, "": UPDATE}


def run_update(state: BridgeState, version: int) -> None:
    for phase in ORDERS[state.transfer]:
        state.check(state.epoch, version, phase)
        state.advance(phase, version)


@pytest.mark.parametrize("transfer", list(ORDERS))
def test_an_update_goes_through_every_phase_in_order(transfer: str) -> None:
    state = BridgeState()
    state.begin_epoch("trainer", "broadcast", transfer)
    for index, phase in enumerate(ORDERS[transfer]):
        for other in UPDATE:
            if other is not phase:
                with pytest.raises(BridgeConflict, match=str(other)):
                    state.check(1, 7, other)
        state.check(1, 7, phase)
        state.advance(phase, 7)
        assert state.in_update == (index < len(UPDATE) - 1)
    assert (state.weight_version, state.updates, state.target_version) == (7, 1, None)


def test_versions_only_grow_within_an_epoch() -> None:
    state = BridgeState()
    state.begin_epoch("first", "broadcast")
    run_update(state, 5)
    for stale in (4, 5):
        with pytest.raises(BridgeConflict, match=f"version {stale} is not newer than version 5"):
            state.check(1, stale, Phase.PREPARED)
    state.begin_epoch("second, from an older checkpoint", "broadcast")
    run_update(state, 2)
    assert state.weight_version == 2


def test_a_superseded_trainer_is_told_so() -> None:
    state = BridgeState()
    state.begin_epoch("first", "broadcast")
    state.begin_epoch("second", "broadcast")
    with pytest.raises(BridgeConflict, match="second holds epoch 2"):
        state.check(1, 1, Phase.PREPARED)


def test_nobody_joins_in_the_middle_of_an_update() -> None:
    state = BridgeState()
    state.begin_epoch("first", "broadcast")
    state.advance(Phase.PREPARED, 1)
    with pytest.raises(BridgeConflict, match=r"second cannot join now: first \(epoch 1\) is in phase prepared"):
        state.begin_epoch("second", "broadcast")


def test_another_version_than_the_prepared_one_is_refused() -> None:
    state = BridgeState()
    state.begin_epoch("trainer", "broadcast")
    state.advance(Phase.PREPARED, 3)
    with pytest.raises(BridgeConflict, match=r"version 4 is not the one that was prepared \(3\)"):
        state.check(1, 4, Phase.PAUSED)


def test_weights_that_were_a_mixture_stay_unhealthy_until_an_update_is_verified() -> None:
    state = BridgeState()
    state.begin_epoch("trainer", "broadcast")
    state.advance(Phase.PREPARED, 1)
    state.fail("torn", weights_intact=False)
    assert not state.healthy
    state.advance(Phase.PREPARED, 1)
    assert not state.healthy, "an update that mends them has begun, and the weights are still the mixture"
    state.fail("again", weights_intact=False)
    state.decide(weights_intact=False)
    assert not state.healthy
    run_update(state, 1)
    assert state.healthy
    assert state.last_error == ""


def test_a_server_that_awaits_weights_is_healthy_only_after_an_update() -> None:
    state = BridgeState()
    state.await_weights("restarted under a trainer")
    assert (state.healthy, state.in_update) == (False, False)
    state.begin_epoch("trainer", "broadcast", "overlapped")
    state.advance(Phase.PREPARED, 4)
    state.fail("the trainer died", weights_intact=True)
    assert not state.healthy, "the checkpoint's weights are still not the trainer's"
    run_update(state, 4)
    assert state.healthy


def test_what_is_undecided_turns_out_well_or_not() -> None:
    state = BridgeState(weight_version=3)
    state.begin_epoch("trainer", "single_copy")
    for intact in (True, False):
        state.advance(Phase.PREPARED, 4)
        state.fail("silent", weights_intact=False, undecided="it may still write")
        assert (state.healthy, state.to_json()["undecided"]) == (False, "it may still write")
        state.decide(intact)
        assert (state.healthy, state.undecided, state.weight_version) == (intact, "", 3)


def test_a_checkpoints_weights_are_not_served_where_others_are_awaited_though_they_are_whole() -> None:
    state = BridgeState()
    state.await_weights("restarted under a trainer")
    state.decide(weights_intact=True)
    assert not state.healthy


def test_a_step_of_an_update_that_was_given_up_is_told_apart() -> None:
    state = BridgeState()
    state.begin_epoch("trainer", "single_copy")
    state.advance(Phase.PREPARED, 1)
    state.fail("silent", weights_intact=True)
    with pytest.raises(UpdateGivenUp, match=r"only from prepared \(the last update failed: silent"):
        state.check(1, 1, Phase.PAUSED)
    with pytest.raises(BridgeConflict) as other:
        state.check(1, 2, Phase.PAUSED)
    assert not isinstance(other.value, UpdateGivenUp)
    state.check(1, 1, Phase.PREPARED)


def test_the_weight_epoch_is_that_of_the_trainer_whose_weights_are_served() -> None:
    state = BridgeState()
    state.begin_epoch("first", "broadcast", weight_epoch=100)
    assert state.weight_epoch == 0, "the checkpoint's weights are served until an update"
    run_update(state, 1)
    state.begin_epoch("second", "broadcast", weight_epoch=200)
    assert (state.weight_epoch, state.next_weight_epoch) == (100, 200)
    run_update(state, 1)
    assert state.to_json()["weight_epoch"] == 200


class Machine(RuleBasedStateMachine):
    """Any sequence of calls: the machine never serves a version whose update was not verified on whole weights."""

    def __init__(self) -> None:
        super().__init__()
        self.state = BridgeState()
        self.live_is_whole = True

    @rule(transfer=st.sampled_from(list(ORDERS)))
    def join(self, transfer: str) -> None:
        if self.state.in_update:
            with pytest.raises(BridgeConflict):
                self.state.begin_epoch("t", "broadcast", transfer)
        else:
            self.state.begin_epoch("t", "broadcast", transfer)

    @precondition(lambda self: self.state.epoch > 0)
    @rule(phase=st.sampled_from(UPDATE), version=st.integers(0, 5))
    def step(self, phase: Phase, version: int) -> None:
        try:
            self.state.check(self.state.epoch, version, phase)
        except BridgeConflict:
            return
        self.state.advance(phase, version)
        if phase is Phase.COMMITTED:
            self.live_is_whole = True

    @precondition(lambda self: self.state.in_update)
    @rule(torn=st.booleans(), known=st.booleans())
    def fail(self, torn: bool, known: bool) -> None:
        self.live_is_whole = self.live_is_whole and not torn
        self.state.fail("x", weights_intact=known and self.live_is_whole, undecided="" if known else "who knows")

    @precondition(lambda self: bool(self.state.undecided))
    @rule()
    def decide(self) -> None:
        self.state.decide(self.live_is_whole)

    @invariant()
    def serves_whole_weights_or_is_unhealthy(self) -> None:
        if self.state.phase is Phase.SERVING:
            assert self.live_is_whole
            assert not self.state.undecided
        assert (self.state.target_version is not None) == (self.state.phase in IN_UPDATE)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
