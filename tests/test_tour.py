"""lab/tour.py, and the notebook that is made of it. To write that anew, with its outputs:

python tests/test_tour.py
"""

import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).parent.parent))

from corpora import countries
from stem import StemFFN
from training import writing

TOUR = Path(__file__).parent.parent / "lab/tour.py"
NOTEBOOK = TOUR.with_suffix(".ipynb")
SAME = (1, 8, 9, 10)  # the steps that print the same of any model


def cells() -> list[dict]:
    """tour.py as cells of a notebook: a line `# %%` begins one. Headings are printed elsewhere."""
    found = []
    for number, part in enumerate(re.split("^# %%", TOUR.read_text(), flags=re.MULTILINE)[1:]):
        kind, _, text = part.partition("\n")
        cell = {"cell_type": "code", "id": str(number), "metadata": {}}
        if kind:
            cell["cell_type"] = "markdown"
            text = "\n".join(line[2:] for line in text.splitlines())
        else:
            cell.update(execution_count=None, outputs=[])
            text = re.sub(r"^title\(.*\n", "", text, flags=re.MULTILINE)
        found.append({**cell, "source": text.strip()})
    return found


def executed(notebook: list[dict]) -> dict:
    """Run the cells in order, and add what they print and draw. Returns their variables."""
    scope = {"__name__": "__main__"}
    plt.close("all")  # others' pictures
    count = 0
    for cell in notebook:
        if cell["cell_type"] != "code":
            continue
        count += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(cell["source"], f"cell {count}", "exec"), scope)
        outputs = []
        if printed.getvalue():
            text = printed.getvalue()
            outputs.append({"output_type": "stream", "name": "stdout", "text": text})
        for number in plt.get_fignums():
            picture = io.BytesIO()
            plt.figure(number).canvas.print_figure(picture, dpi=80, bbox_inches="tight")
            plt.close(number)
            data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
            outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
        cell.update(execution_count=count, outputs=outputs)
    return scope


def printed_by_step(notebook: list[dict]) -> dict[int, str]:
    found = {}
    step = 0
    for cell in notebook:
        heading = re.match(r"## (\d+)\.", cell["source"])
        step = int(heading[1]) if heading else step
        texts = [each["text"] for each in cell.get("outputs", []) if "text" in each]
        found[step] = found.get(step, "") + "".join(texts)
    return found


def test_the_notebook_is_the_tour_and_prints_what_it_shows(tmp_path, monkeypatch):
    """On fewer countries, whose corpus takes less time, and of a model that learns nothing."""
    shown = json.loads(NOTEBOOK.read_text())["cells"]
    notebook = cells()
    assert [cell["source"] for cell in shown] == [cell["source"] for cell in notebook]

    some = countries.table()[::20]
    some += [country for country in countries.table() if country.name in ("Spain", "Germany")]
    monkeypatch.setattr(countries, "table", lambda: some)
    monkeypatch.setattr(writing, "N_TEXT", 4)
    monkeypatch.setattr(sys, "argv", ["tour.py", "--quick"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    tour = executed(notebook)
    ours, theirs = map(printed_by_step, (notebook, shown))
    assert ours.keys() == theirs.keys() == set(range(11))
    for step, text in theirs.items():
        lines = [line for line in text.splitlines() if step in SAME or line.endswith("True")]
        assert [line for line in ours[step].splitlines() if line in lines] == lines
        assert text or step == 0
    for one, other in zip(notebook, shown, strict=True):
        assert len(one.get("outputs", [])) == len(other.get("outputs", []))
    assert sum("image/png" in str(cell.get("outputs")) for cell in shown) == 5

    # The formulas are those of the layers.
    stem = StemFFN(tour["n_embd"], tour["d_ff"])
    stem.load_state_dict({f"{name}.weight": tour[f"w_{name}"] for name in ("gate", "down")})
    x, ids = tour["x"], torch.tensor([5, 9, 5])
    torch.testing.assert_close(stem(x, tour["table"][ids]), tour["stem"](x, ids))


if __name__ == "__main__":
    plt.switch_backend("Agg")
    notebook = cells()
    executed(notebook)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": notebook, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    NOTEBOOK.write_text(json.dumps(whole, indent=1) + "\n")
