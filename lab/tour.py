# %% [markdown]
# # Token tables in ten steps
#
# What tables are, what their rows hold, and what it is good for that only the token selects a row.
# `python lab/tour.py` takes some seconds a step, and before them as long as `python train.py` if
# that has not run; with `--quick`, of a model that learns nothing. As `tour.ipynb`, or in an editor
# that knows `# %%`, it goes cell by cell. Pictures are also written to `out/tour`.

# %%
import contextlib
import io
import os
import sys
from pathlib import Path

# The repository, as this file and as the notebook find it, and the tests' simulated GPU.
if Path(sys.argv[0]).name == "tour.py":
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent.parent))
else:
    sys.path.insert(0, str(Path("..").resolve() if Path.cwd().name == "lab" else Path.cwd()))
sys.path.append(f"{sys.path[0]}/tests")

import common  # before torch, whose threads it tells how to wait

# isort: split
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from corpora import countries
from corpora.questions import score_answers
from lab.rows import compared, nearest, swapped
from model import Decoder, ModelConfig
from offload import OffloadedTables
from stem import substitute
from tables.rmsprop import RowRMSprop
from tables.storage import DiskStorage
from text.tokenizer import encode
from train import resolve_settings, train
from training.batches import Data
from training.checkpoints import load_model
from training.edits import Edit, new_rows
from training.records import read_run

from simulated_gpu import SimulatedGpu  # isort: skip

SCRIPT = Path(sys.argv[0]).name == "tour.py"  # not the notebook
QUICK = False
if SCRIPT:
    parser = common.make_parser("Token tables in ten steps.")
    parser.add_argument("--quick", action="store_true", help="a model that learns nothing")
    QUICK = parser.parse_args().quick
if Path.cwd().name == "lab":  # where Jupyter begins
    os.chdir("..")
OUT = Path("out/tour")
OUT.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)


def title(text):
    if SCRIPT:  # a notebook has headings
        print(f"\n{text}\n{'-' * len(text)}")


# %% [markdown]
# ## 1. The formula
#
# The FFN of a Llama reads `x` through a gate and an up-projection: `W_d (SiLU(W_g x) * (W_u x))`.
# STEM (arXiv 2601.10639) looks the second factor up: `W_d (SiLU(W_g x) * U_l[t])`, a row for each
# token id `t` in a table of layer `l`. A third of the multiplications is gone. There are many more
# parameters, of which a token reads one row.

# %%
title("1. The formula")
vocab_size, n_embd, d_ff = 1000, 64, 192
w_gate, w_up = torch.randn(2, d_ff, n_embd) / n_embd**0.5
w_down = torch.randn(n_embd, d_ff) / d_ff**0.5
table = torch.randn(vocab_size, d_ff) * 0.02  # U_l


def dense(x):  # [T, n_embd] -> [T, n_embd]
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def stem(x, ids):  # [T, n_embd], [T] -> [T, n_embd]
    return F.linear(F.silu(F.linear(x, w_gate)) * table[ids], w_down)


x, three = torch.randn(3, n_embd), torch.tensor([5, 9, 5])  # three tokens
print(f"dense {tuple(dense(x).shape)}, STEM {tuple(stem(x, three).shape)}")
print(f"numbers that are multiplied: dense {3 * w_up.numel():,}, STEM {2 * w_up.numel():,}")
print(f"numbers in the table: {table.numel():,}, of which a token reads {d_ff}")

# %% [markdown]
# ## 2. The rows of a prompt
#
# The model of `python train.py` has six layers, of which all but the first have a table. It learned
# from text about the world's 195 states. Which rows a prompt reads is known before the first layer
# runs. The picture is what layer 1 reads: a line for each token.


# %%
title("2. The rows of a prompt")


def run(out, **flags):
    """The evaluations of a run with these flags of train.py, whose own report is left out."""
    if QUICK:
        flags.update(n_layer=3, n_embd=32, max_iters=2, eval_interval=2)
    with contextlib.redirect_stdout(io.StringIO()):
        # What is wrong with files is one line.
        common.run_command(lambda: train(resolve_settings(out_dir=out, **flags)))
    return read_run(out)["eval"]


RUN = OUT / "quick" if QUICK else Path("out")
if not (RUN / "loss.png").exists():  # with which a run ends
    print("training a model, as long as `python train.py` takes", flush=True)
    run(RUN, resume=(RUN / "ckpt.pt").exists())
model, encoding, checkpoint = load_model(RUN, torch.device("cpu"))
if (model.config.ffn, [data["corpus"] for data in checkpoint["data"]]) != ("stem", ["countries"]):
    sys.exit(f"error: {RUN} is no model of `python train.py`: move it, and one is trained")

prompt = "Country: Spain\nThe capital city is called"
ids = encode(encoding, prompt)  # [T]
tokens = [repr(encoding.decode([token])) for token in ids]
rows = list(model.tables.lookup(torch.tensor([ids])))  # of each table [1, T, d_ff]
print(f"{len(ids)} tokens read {len(rows)} rows each, of {rows[0].shape[-1]} numbers")

plt.figure(figsize=(8, 2.6))
plt.imshow(rows[0][0, :, :96].numpy(), aspect="auto", cmap="RdBu")
plt.yticks(range(len(tokens)), tokens)
plt.xlabel("the first 96 numbers of each row in layer 1")
plt.savefig(OUT / "rows.png", bbox_inches="tight")

# %% [markdown]
# ## 3. Which rows are alike, before and after training
#
# Rows begin as noise. After training, tokens that are used alike have rows that point alike. The
# picture shows the rows of the states whose names are one token, in the two directions in which
# they differ most. Colors are regions.

# %%
title("3. Which rows are alike, before and after training")
untrained = Decoder(model.config)
for word in (" Spain", " Madrid", " euro", " is"):
    for when, tables in (("before", untrained.tables), ("after", model.tables)):
        _, near = nearest(tables, encoding, encoding.encode_ordinary(word), table=0, n=5)[0]
        others = ", ".join(f"{other.strip()} {cosine:.2f}" for other, cosine in near[1:])
        print(f"{word:8} {when:6}  {others}")

names = [(country, encoding.encode_ordinary(f" {country.name}")) for country in countries.table()]
single = [(country.region, name[0]) for country, name in names if len(name) == 1]
figure, axes = plt.subplots(1, 2, figsize=(8, 3))
for axis, (when, tables) in zip(
    axes, (("before", untrained.tables), ("after", model.tables)), strict=True
):
    rows = tables.weight[0][[token for _, token in single]].detach()  # [n, d_ff]
    rows = F.normalize(rows) - F.normalize(rows).mean(0)
    places = rows @ torch.linalg.svd(rows)[2][:2].T  # [n, 2]
    for region in sorted({region for region, _ in single}):
        of_region = [number for number, (other, _) in enumerate(single) if other == region]
        axis.scatter(*places[of_region].T.numpy(), s=12, label=region)
    axis.set(title=f"{when} training", xticks=[], yticks=[])
axes[1].legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.savefig(OUT / "alike.png", bbox_inches="tight")

# %% [markdown]
# ## 4. Which layer holds what
#
# Spain reads Germany's rows, in one layer at a time. All else stays: prompt, weights, and what the
# residual stream knows of Spain. In this run layers 1 to 3 hold the capital, and the last two
# nothing of it. To say Berlin takes several of them.

# %%
title("4. Which layer holds what")
spain, germany = (encoding.encode_ordinary(name) for name in (" Spain", " Germany"))
others = substitute(torch.tensor(ids), spain, germany).tolist()  # [T]
answers = [encoding.encode_ordinary(answer) for answer in (" Madrid.", " Berlin.")]
layers = model.config.row_layers
swaps = {f"layer {layer}": [table] for table, layer in enumerate(layers)}
swaps = {"none": [], **swaps, "all": list(range(len(layers)))}
tables = model.tables
found = []
for swap in swaps.values():
    model.tables = swapped(tables, ids, others, swap)
    read = [model.tables.ids] * 2
    found.append(score_answers(model, [ids] * 2, answers, read).probability.tolist())
model.tables = tables
for swap, (madrid, berlin) in zip(swaps, found, strict=True):
    print(f"rows swapped in {swap:8} Madrid {madrid:6.1%}   Berlin {berlin:6.1%}")

plt.figure(figsize=(8, 2.4))
for at, (name, p) in enumerate(zip(("Madrid", "Berlin"), zip(*found, strict=True), strict=True)):
    plt.bar([number + 0.4 * at for number in range(len(swaps))], p, width=0.4, label=name)
plt.xticks([number + 0.2 for number in range(len(swaps))], swaps)
plt.ylabel("probability")
plt.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.savefig(OUT / "layers.png", bbox_inches="tight")

# %% [markdown]
# ## 5. An edit and its undo
#
# `edit.py --write` trains rows of Spain, and nothing else, to say Lisbon. What the model says of
# Spain otherwise is held. To undo it is to read the old rows.

# %%
title("5. An edit and its undo")
with torch.no_grad():
    before = model(torch.tensor([ids]))[0]  # [1, T, V]
wanted = Edit(source="Spain", write="Lisbon.", prompt=prompt)
located, written = new_rows(model, encoding, wanted)
texts = compared(model, encoding, wanted, located, written)
for when in ("before", "after"):
    print(f"{when:7}", "".join(token for token, _ in texts[when]))
for text, *p in texts["answers"]:
    print(f"probability of {text:9} before {p[0]:6.1%}   after {p[1]:6.1%}")
model.tables = tables
with torch.no_grad():
    print("undone to the bit:", torch.equal(before, model(torch.tensor([ids]))[0]))

# %% [markdown]
# ## 6. Tables on disk
#
# A batch reads few rows, known in advance, and only these change. So tables may be where there is
# room. With a GPU, `--offload cpu` or `--offload disk` keeps them away from it. Without one, files
# are read and changed in place. Losses are the same, to the last bit.

# %%
title("6. Tables on disk")
losses = {}
short = dict(overwrite=True, max_iters=20, eval_tokens=1024)
for offload in ("none", "disk"):
    losses[offload] = run(OUT / offload, offload=offload, **short)[-1]["val_loss"]
files = sorted((OUT / "disk/ckpt.pt.tables").glob("*/*"))
print("files:", ", ".join(f"{file.name} {file.stat().st_size:,} bytes" for file in files))
print("same validation loss:", losses["none"] == losses["disk"])

# %% [markdown]
# ## 7. What a batch reads, and what travels
#
# Of a batch's tokens, few are distinct, and many of those were in the batch before. With tables
# away from the GPU, rows of the last batch stay there. Only others travel.

# %%
title("7. What a batch reads, and what travels")
data = Data("data/countries", "text", block_size=128, seed=0, total=8 * 20)
row_bytes = 4 * len(layers) * model.config.d_ff
last = torch.tensor([], dtype=torch.int64)
stay, travel = [], []
for step in range(20):
    distinct = data.train.batch(step, size=8)[0].unique()  # [n]
    stay.append(torch.isin(distinct, last).sum().item())
    travel.append(len(distinct) - stay[-1])
    last = distinct
print(f"a batch has {8 * 128:,} tokens, the last one {len(distinct)} distinct ones: {travel[-1]}")
print(f"travel, {travel[-1] * row_bytes / 1e6:.1f} MB; the tables have", end=" ")
print(f"{model.config.vocab_size * row_bytes / 1e6:.1f} MB")

plt.figure(figsize=(8, 2.2))
plt.bar(range(20), stay, label="stay")
plt.bar(range(20), travel, bottom=stay, label="travel")
plt.xlabel("batch")
plt.xticks(range(0, 20, 5))
plt.ylabel("distinct tokens")
plt.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.savefig(OUT / "travel.png", bbox_inches="tight")

# %% [markdown]
# ## 8. The ring's timeline
#
# Who may overtake whom? The tests have a simulated GPU (`tests/simulated_gpu.py`), which works out
# what comes before what. Here tables are in files. A worker of the host gathers the next batch's
# rows into pinned buffers, and a side stream copies them, both beside this batch's passes. After
# the update, rows that leave go back. Each bar begins as soon as CUDA would let it. Lengths are
# made up: one for each use of memory.

# %%
title("8. The ring's timeline")
LANES = {1: "compute stream", 2: "side stream", 3: "worker"}  # by the numbers of agents
PHASES = {"lookup": "C0", "fetch the next": "C1", "backward": "C7", "update": "C2"}


class Timed(SimulatedGpu):
    """Also notes when each use of memory can begin."""

    def __enter__(self):
        self.ends = {}  # of each agent's uses, by their numbers
        self.bars = []  # agent, start, phase
        self.phase = None
        return super().__enter__()

    def use(self, agent, *args, **kwargs):
        seen = list(enumerate(agent.seen.tolist()))  # of each agent the last use that comes before
        super().use(agent, *args, **kwargs)
        number = agent.seen[agent.number]
        if self.phase and number > seen[agent.number][1]:
            start = max(self.ends.get(use, 0) for use in seen)
            self.ends[agent.number, number] = start + 1
            self.bars.append((agent.number, start, self.phase))


torch.manual_seed(0)
batches = [torch.randint(128, (1, 64)) for _ in range(4)]
common.remove(OUT / "ring")
with Timed(late=False) as gpu:
    storage = DiskStorage.create(OUT / "ring", (128, 3, 4), torch.float32)
    ring = OffloadedTables(storage, gpu.device, chunk_bytes=512)
    ring.init_rows(1.0)
    optimizer = RowRMSprop(ring.train())
    for step, batch in enumerate(batches[:3]):
        gpu.phase = "lookup" if step else None  # the first one fills the working set
        loss = sum(
            (rows.sin() * (table + 1)).sum() for table, rows in enumerate(ring.lookup(batch))
        )
        gpu.phase = gpu.phase and "fetch the next"
        ring.prefetch(batches[step + 1])
        gpu.phase = gpu.phase and "backward"
        loss.backward()
        gpu.phase = gpu.phase and "update"
        optimizer.step(lr=0.1)
print(f"{len(gpu.bars)} uses of shared memory in two steps, no hazard")

plt.figure(figsize=(8, 2.4))
for phase, color in PHASES.items():
    bars = [(agent, start) for agent, start, of_phase in gpu.bars if of_phase == phase]
    agents, starts = zip(*bars, strict=True)
    plt.barh(agents, 1, left=starts, color=color, label=phase)
plt.yticks(list(LANES), LANES.values())
plt.gca().invert_yaxis()
plt.xlabel("time, in uses of memory")
plt.legend(title="asked for in", loc="upper left", bbox_to_anchor=(1, 1))
plt.savefig(OUT / "ring.png", bbox_inches="tight")

# %% [markdown]
# ## 9. Embformer: no linear layer
#
# Embformer (Wu, 2025) takes keys, values and the factor of its FFN from rows: `norm(K_l[t])`,
# `V_l[t]`, `mix(SiLU(x) * F_l[t])`. Its note says why no matrix is missed (section 2.1): a linear
# layer is attention to its own inputs. The weight of an input is its share of the sum of sizes, its
# value a column of the matrix. Sign and sum go into the values.

# %%
title("9. Embformer: no linear layer")


def linear_as_attention(x, w):  # [T, n_in], [n_out, n_in] -> [T, n_out]
    total = x.abs().sum(-1, keepdim=True)  # [T, 1]
    weights = x.abs() / total  # [T, n_in], of each token they add up to one
    values = w.T * (total * x.sign())[:, :, None]  # [T, n_in, n_out]
    return (weights[:, None] @ values)[:, 0]


same = torch.allclose(linear_as_attention(x, w_up), F.linear(x, w_up), rtol=1e-3, atol=1e-4)
print("a linear layer is attention:", same)
embformer = Decoder(ModelConfig(vocab_size, 128, 6, 4, 128, ffn="embformer")).eval()
for name, parameter in embformer.named_parameters():
    print(f"{name:16} {tuple(parameter.shape)}")

# %% [markdown]
# ## 10. Decoding from ids alone
#
# Keys and values that are rows need no cache: the cache of a text is the text. Decoding looks the
# rows of all its tokens up again, and writes the same.

# %%
title("10. Decoding from ids alone")
start = torch.tensor([[0]])
written = {}
for kind in ("kv", "ids"):
    written[kind] = embformer.generate(start, 100, seed=0, cache=kind)  # [1, 101]
keys_and_values = 2 * 4 * 6 * 128
print(f"to keep of a token: keys and values {keys_and_values:,} bytes, ids {start.element_size()}")
print("same text:", torch.equal(written["kv"], written["ids"]))

# %% [markdown]
# Next: `python lab/page.py` has edits, rows and chat in the browser. A layer of your own is the end
# of `README.md`.
