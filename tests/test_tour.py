"""lab/tour.py runs, computes what the layers do, and is the notebook beside it. To write that anew:

python tests/test_tour.py
"""

import json
import runpy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from corpora import countries
from stem import StemFFN

TOUR = Path(__file__).parent.parent / "lab/tour.py"
NOTEBOOK = TOUR.with_suffix(".ipynb")


def notebook() -> str:
    """tour.py as a notebook: `# %%` begins a cell."""
    cells = []
    for number, part in enumerate(TOUR.read_text().split("# %%")[1:]):
        kind, _, text = part.partition("\n")
        cell = {"cell_type": "code", "id": str(number), "metadata": {}}
        if kind:
            cell["cell_type"] = "markdown"
            text = "\n".join(line[2:] for line in text.splitlines())
        else:
            cell.update(execution_count=None, outputs=[])
        cells.append({**cell, "source": text.strip()})
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1) + "\n"


def test_the_notebook_is_the_tour():
    assert NOTEBOOK.read_text() == notebook()


def test_the_tour_runs(tmp_path, monkeypatch):
    """On fewer countries: the corpus of all takes seconds."""
    some = countries.table()[::20]
    some += [country for country in countries.table() if country.name in ("Spain", "Germany")]
    monkeypatch.setattr(countries, "table", lambda: some)
    monkeypatch.setattr(sys, "argv", ["tour.py", "--quick"])
    monkeypatch.chdir(tmp_path)
    tour = runpy.run_path(str(TOUR))
    stem = StemFFN(tour["n_embd"], tour["d_ff"])
    stem.load_state_dict({f"{name}.weight": tour[f"w_{name}"] for name in ("gate", "down")})
    rows = tour["table"][tour["ids"]]
    torch.testing.assert_close(stem(tour["x"], rows), tour["stem"](tour["x"], tour["ids"]))
    linear = F.linear(tour["x"], tour["w_up"])
    torch.testing.assert_close(tour["linear_as_attention"](tour["x"], tour["w_up"]), linear)
    assert len(set(tour["losses"].values())) == 1
    before = torch.load("out/tour/stem/ckpt.pt")["model"]["tables.weight.0"]
    spain, germany = tour["spain"], tour["germany"]
    assert torch.equal(tour["model"].tables.weight[0][spain], before[germany])
    assert Path("out/tour/tour.png").exists()


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook())
