"""guide_commands.py: a trainer's log lines about restarts."""

from __future__ import annotations

from pathlib import Path

from bench.gpu.legacy_figures import legacy_figures, legacy_table

LOG = """\
12:00:00 [Bridge] vLLM will run on GPU 0, beside the trainer; it gets --gpu-memory-utilization 0.29
12:00:40 [Bridge] vLLM serves weight version 0 after 40.1 s
23:59:50 Saved the weights of out/step_2 for vLLM
00:00:10 [Bridge] vLLM serves weight version 2 after 18.5 s
00:00:25 Saved checkpoint out/step_2
00:00:30 Saved checkpoint out/step_3
"""


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    for step in (2, 10):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "model.safetensors").write_bytes(b"0" * 2_000_000)
    (tmp_path / "step_10" / "trainer_state").mkdir()
    (tmp_path / "step_10" / "trainer_state" / "optimizer.safetensors").write_bytes(
        b"0" * 12_000_000
    )
    rows = [{"step": 1}, {"step": 2, "sync/stop": 1.234, "sync/start": 17.25}]
    found = legacy_figures(LOG, rows, tmp_path)
    assert found["server"].endswith("--gpu-memory-utilization 0.29")
    assert found["starts"] == [{"version": 0, "seconds": 40.1}, {"version": 2, "seconds": 18.5}]
    assert found["seconds_of_restarts"] == [{"step": 2, "stop": 1.23, "start": 17.25}]
    assert found["seconds_from_weights_to_state"] == {"step_2": 35}
    assert list(found["checkpoints"].items()) == [
        ("step_2", {"weights_gb": 0.002, "state_gb": 0.0}),
        ("step_10", {"weights_gb": 0.002, "state_gb": 0.012}),
    ]
    shown = legacy_table(found)
    assert "18.5" in shown
    assert "step_10" in shown
