"""tour.py runs, computes what the layers do, and is the notebook beside it. To write that anew:

python tests/test_tour.py
"""

import json
import runpy
import sys
from pathlib import Path

import torch
from baselines import SwiGLU
from config import ModelConfig

from stem import StemFFN
from text import countries

ROOT = Path(__file__).parent.parent


def notebook() -> str:
    """tour.py as a notebook: `# %%` begins a cell."""
    cells = []
    for number, part in enumerate((ROOT / "tour.py").read_text().split("# %%")[1:]):
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
    assert (ROOT / "tour.ipynb").read_text() == notebook()


def test_the_tour_runs(tmp_path, monkeypatch):
    """On fewer countries: the corpus of all takes seconds."""
    some = countries.table()[::20]
    some += [country for country in countries.table() if country.name in ("Spain", "Germany")]
    assert len(set(some)) == len(some)
    monkeypatch.setattr(countries, "table", lambda: some)
    monkeypatch.setattr(sys, "argv", ["tour.py", "--quick"])
    monkeypatch.chdir(tmp_path)
    tour = runpy.run_path(str(ROOT / "tour.py"))
    config = ModelConfig(n_head=2, n_embd=tour["n_embd"], d_ff=tour["d_ff"])
    weights = {f"{name}.weight": tour[f"w_{name}"] for name in ("gate", "up", "down")}
    x, rows = tour["x"], tour["table"][tour["ids"]]
    dense, stem = SwiGLU(config), StemFFN(config)
    dense.load_state_dict(weights)
    torch.testing.assert_close(dense(x, None), tour["dense"](x))
    del weights["up.weight"]
    stem.load_state_dict(weights)
    torch.testing.assert_close(stem(x, rows), tour["stem"](x, tour["ids"]))
    assert len(set(tour["losses"].values())) == 1
    before = torch.load("out/tour/stem/ckpt.pt")["model"]["tables.weight.0"]
    spain, germany = tour["spain"], tour["germany"]
    assert torch.equal(tour["model"].tables.weight[0][spain], before[germany])
    assert Path("out/tour/tour.png").exists()


if __name__ == "__main__":
    (ROOT / "tour.ipynb").write_text(notebook())
