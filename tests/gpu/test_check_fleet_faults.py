"""check_fleet_faults.py's reading of pytest's report; needs no GPU."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.check_fleet_faults import rows_of, shown, summary

REPORT = """<testsuites><testsuite>
<testcase name="test_one_of_three_fails[direct-one_gpu-begin-kill]" time="3.5"><properties>
 <property name="update_s" value="0.25"/><property name="back_s" value="1.5"/></properties></testcase>
<testcase name="test_one_of_three_fails[direct-two_gpus-begin-kill]" time="0.0"><skipped message="needs 2 GPUs"/></testcase>
<testcase name="test_all_are_gone_and_back[direct-one_gpu]" time="9.0"><failure message="assert 1 == 2"/></testcase>
</testsuite></testsuites>"""


def test_rows_say_what_ran_whether_it_was_good_and_what_it_took(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    one, other = rows = rows_of("one GPU", report)
    assert (one["test"], one["case"], one["good"]) == (
        "one_of_three_fails",
        "direct-one_gpu-begin-kill",
        True,
    )
    assert (one["update_s"], one["back_s"], one["seconds"]) == (0.25, 1.5, 3.5)
    assert (other["test"], other["good"]) == ("all_are_gone_and_back", False)
    assert "update_s" not in other
    found = summary(rows)
    assert (found["tests"], found["good"], found["update"]["max"], found["back"]["n"]) == (
        2,
        1,
        250.0,
        1,
    )
    assert "one of three fails" in shown(rows)
