"""The state machine: versions only grow, a mixture is never called healthy, and a quarantine ends
with a full update.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_patching.server.state import BridgeConflict, BridgeState, Phase, UpdateGivenUp


def joined(trainer: str = "trainer", weight_epoch: int = 0) -> BridgeState:
    state = BridgeState()
    state.begin_epoch(trainer, "broadcast", weight_epoch=weight_epoch)
    return state


def run_update(state: BridgeState, version: int) -> None:
    state.check_begin(state.epoch, version)
    state.begin(version)
    state.check_commit(state.epoch, version)
    state.serve([f"sum of {version}"])


def test_an_update_begins_and_is_committed() -> None:
    state = joined()
    with pytest.raises(
        BridgeConflict, match="version 7 cannot be committed while the server is serving"
    ):
        state.check_commit(1, 7)
    state.check_begin(1, 7)
    state.begin(7)
    assert (state.phase, state.target_version, state.healthy) == (Phase.UPDATING, 7, True)
    with pytest.raises(BridgeConflict, match="an update to version 7 is in progress"):
        state.check_begin(1, 8)
    with pytest.raises(BridgeConflict, match=r"version 8 was not begun, but 7"):
        state.check_commit(1, 8)
    state.check_commit(1, 7)
    state.serve(["sum"])
    assert (state.phase, state.weight_version, state.updates, state.target_version) == (
        Phase.SERVING,
        7,
        1,
        None,
    )
    assert state.checksums == ["sum"]


def test_versions_only_grow_within_an_epoch() -> None:
    state = joined("first")
    run_update(state, 5)
    for stale in (4, 5):
        with pytest.raises(BridgeConflict, match=f"version {stale} is not newer than version 5"):
            state.check_begin(1, stale)
    state.begin_epoch("second, from an older checkpoint", "broadcast")
    run_update(state, 2)
    assert state.weight_version == 2


def test_a_superseded_trainer_is_told_so() -> None:
    state = joined("first")
    state.begin_epoch("second", "broadcast")
    with pytest.raises(BridgeConflict, match="second holds epoch 2"):
        state.check_begin(1, 1)


def test_no_step_comes_before_a_trainer_has_joined() -> None:
    with pytest.raises(BridgeConflict, match="no trainer has joined this server, so there is no"):
        BridgeState().check_begin(0, 1)


def test_nobody_joins_in_the_middle_of_an_update() -> None:
    state = joined("first")
    state.begin(1)
    with pytest.raises(
        BridgeConflict,
        match=r"second cannot join now: first \(epoch 1\) is in an update to version 1",
    ):
        state.begin_epoch("second", "broadcast")


def test_weights_that_were_a_mixture_stay_unhealthy_until_an_update_is_verified() -> None:
    state = joined()
    state.begin(1)
    state.fail("torn", weights_intact=False)
    assert not state.healthy
    state.begin(1)
    assert not state.healthy, (
        "an update that mends them has begun, and the weights are still the mixture"
    )
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
    state.begin(4)
    state.fail("the trainer died", weights_intact=True)
    assert not state.healthy, "the checkpoint's weights are still not the trainer's"
    run_update(state, 4)
    assert state.healthy


def test_what_is_undecided_turns_out_well_or_not() -> None:
    state = BridgeState(weight_version=3)
    state.begin_epoch("trainer", "single_copy")
    for intact in (True, False):
        state.begin(4)
        state.fail("silent", weights_intact=False, undecided="it may still write")
        assert (state.healthy, state.to_json()["undecided"]) == (False, "it may still write")
        state.decide(intact)
        assert (state.healthy, state.undecided, state.weight_version) == (intact, "", 3)


def test_a_checkpoints_weights_are_not_served_where_others_are_awaited_though_they_are_whole() -> (
    None
):
    state = BridgeState()
    state.await_weights("restarted under a trainer")
    state.decide(weights_intact=True)
    assert not state.healthy


def test_a_step_of_an_update_that_was_given_up_is_told_apart() -> None:
    state = joined()
    state.begin(1)
    state.fail("silent", weights_intact=True)
    with pytest.raises(UpdateGivenUp, match=r"only in an update \(the last update failed: silent"):
        state.check_commit(1, 1)
    with pytest.raises(BridgeConflict) as other:
        state.check_commit(1, 2)
    assert not isinstance(other.value, UpdateGivenUp)
    state.check_begin(1, 1)


def test_the_weight_epoch_is_that_of_the_trainer_whose_weights_are_served() -> None:
    state = joined("first", weight_epoch=100)
    assert state.weight_epoch == 0, "the checkpoint's weights are served until an update"
    run_update(state, 1)
    state.begin_epoch("second", "broadcast", weight_epoch=200)
    assert (state.weight_epoch, state.next_weight_epoch) == (100, 200)
    run_update(state, 1)
    assert state.to_json()["weight_epoch"] == 200


def test_a_quarantine_ends_with_a_full_update_of_the_same_version_or_a_later_one() -> None:
    state = joined()
    run_update(state, 5)
    state.put_in_quarantine("it was late")
    assert (state.phase, state.healthy, state.to_json()["quarantine"]) == (
        Phase.UNHEALTHY,
        False,
        "it was late",
    )
    with pytest.raises(BridgeConflict, match="version 4 is not newer"):
        state.check_begin(1, 4)
    state.begin(5)
    state.fail("lost again", weights_intact=True)
    assert not state.healthy, "whole weights do not end a quarantine"
    run_update(state, 5)
    assert (state.healthy, state.quarantine) == (True, "")


def test_an_update_during_which_the_server_was_put_in_quarantine_is_not_served() -> None:
    state = joined()
    state.begin(1)
    state.put_in_quarantine("it was late")
    assert (state.in_update, state.healthy) == (True, False)
    with pytest.raises(BridgeConflict, match="quarantine: it was late"):
        state.check_commit(1, 1)
    state.fail("quarantine", weights_intact=True)
    with pytest.raises(BridgeConflict) as late:
        state.check_commit(1, 1)
    assert not isinstance(late.value, UpdateGivenUp), "its trainer does not want it to do it anew"
    assert state.phase is Phase.UNHEALTHY
    run_update(state, 1)


class Machine(RuleBasedStateMachine):
    """Any sequence of calls: the machine never serves a version whose update was not verified on
    whole weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = BridgeState()
        self.live_is_whole = True
        self.held_back = False

    @rule(transfer=st.sampled_from(["direct", "overlapped", ""]))
    def join(self, transfer: str) -> None:
        if self.state.in_update:
            with pytest.raises(BridgeConflict):
                self.state.begin_epoch("t", "broadcast", transfer)
        else:
            self.state.begin_epoch("t", "broadcast", transfer)

    @precondition(lambda self: self.state.epoch > 0)
    @rule(version=st.integers(0, 5), epochs_ago=st.integers(0, 1))
    def begin(self, version: int, epochs_ago: int) -> None:
        try:
            self.state.check_begin(self.state.epoch - epochs_ago, version)
        except BridgeConflict:
            return
        assert epochs_ago == 0
        self.state.begin(version)
        self.begun_in_quarantine = self.held_back

    @rule(version=st.integers(0, 5))
    def commit(self, version: int) -> None:
        try:
            self.state.check_commit(self.state.epoch, version)
        except BridgeConflict:
            return
        assert self.held_back == self.begun_in_quarantine, (
            "a quarantine that came in the update ends it"
        )
        self.state.serve(["sum"])
        self.live_is_whole, self.held_back = True, False

    @precondition(lambda self: self.state.in_update)
    @rule(torn=st.booleans(), known=st.booleans())
    def fail(self, torn: bool, known: bool) -> None:
        self.live_is_whole = self.live_is_whole and not torn
        self.state.fail(
            "x", weights_intact=known and self.live_is_whole, undecided="" if known else "who knows"
        )

    @precondition(lambda self: bool(self.state.undecided))
    @rule()
    def decide(self) -> None:
        self.state.decide(self.live_is_whole)

    @rule()
    def quarantine(self) -> None:
        self.state.put_in_quarantine("late")
        self.held_back, self.begun_in_quarantine = True, False

    @invariant()
    def serves_whole_weights_or_is_unhealthy(self) -> None:
        if self.state.phase is Phase.SERVING:
            assert self.live_is_whole
            assert not self.state.undecided
            assert not self.held_back
        if self.held_back:
            assert not self.state.healthy
        assert (self.state.target_version is not None) == self.state.in_update


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
