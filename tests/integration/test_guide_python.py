"""``docs/guides/python.md``: each of its blocks is run, in order, by one program, as a reader would."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

from tests.support.runs import ROOT, Workbench

TRAIN = """
import time
for step in range(5):
    print("step", step, flush=True)
    time.sleep(0.05)
"""
# The run that is scaled and taken down has to live until then.
_ENDLESS = "import time\nfor _ in range(1200):\n    time.sleep(0.05)\n"


def test_every_block_of_the_guide_does_what_it_says(workbench: Workbench) -> None:
    guide = (ROOT / "docs/guides/python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == 5
    (workbench.folder / "train.py").write_text(TRAIN)
    long = f"import pathlib\npathlib.Path('train.py').write_text({_ENDLESS!r})\n"
    short = f"pathlib.Path('train.py').write_text({TRAIN!r})\n"
    program = "\n".join([blocks[0], blocks[1], long, blocks[2], short, blocks[3], blocks[4]])

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=workbench.folder,
        env=workbench.env,
        text=True,
        capture_output=True,
        timeout=90,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "SUCCEEDED ()"
    seen = [line.split()[1] for line in lines[1:] if line[:1].isdigit() and len(line.split()) > 3]
    assert seen.count("rank_spawned") >= 2, "in the third part, too: its second run"
    assert "1 0 step 4" in lines
    (listed,) = (line for line in lines if line.startswith("[("))
    assert sorted(ast.literal_eval(listed)) == [("mine", "SUCCEEDED"), ("second", "SUCCEEDED")]
    assert lines[lines.index("3") + 1] == "CANCELLED"
    assert lines[-2] == "SUCCEEDED"
    assert "min_replicas" in lines[-1]
