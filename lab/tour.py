# %% [markdown]
# # Token tables in six steps
#
# From a dense FFN to one that looks up part of its weights by token id: trained, edited, and moved
# to disk. Some minutes on two CPU cores as `python lab/tour.py`; with `--quick`, seconds, of models
# that learn nothing; or cell by cell, in an editor that knows `# %%` or as `tour.ipynb`, from the
# folder of the repository. Not run on a T4 yet.

# %%
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

# The repository, as the notebook and as this file find it.
sys.path.insert(0, ".." if Path.cwd().name == "lab" else ".")
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent.parent))

import common
from text.tokenizer import encode
from train import resolve_settings, train
from training.checkpoints import load_model
from training.records import read_run

QUICK = False
if Path(sys.argv[0]).name == "tour.py":  # not the notebook
    parser = common.make_parser("The idea of token tables in six steps.")
    parser.add_argument("--quick", action="store_true", help="models that learn nothing")
    QUICK = parser.parse_args().quick
OUT = Path("out/tour")

# %% [markdown]
# ## 1. A dense FFN
#
# The FFN of a Llama reads the residual stream `x` at each token through three matrices. The gate
# says which hidden units are on, the up-projection what they say, and the down-projection writes
# it back.

# %%
vocab_size, n_embd, d_ff = 1000, 64, 192
w_gate, w_up = torch.randn(2, d_ff, n_embd) / n_embd**0.5
w_down = torch.randn(n_embd, d_ff) / d_ff**0.5


def dense(x):  # [T, n_embd] -> [T, n_embd]
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


x = torch.randn(3, n_embd)  # at three tokens
print(dense(x).shape)

# %% [markdown]
# ## 2. `E[t]` in place of the up-projection
#
# STEM (arXiv 2601.10639) looks up what the hidden units say: a row for each token id. A third of
# the multiplications is gone, and there are many more parameters, of which a token reads one row.
# Nothing but the id decides which, so the row can be fetched before the first layer runs.
# `stem.py` is this function, but for the lookup, which is done for all layers in `tables/`.

# %%
table = torch.randn(vocab_size, d_ff) * 0.02


def stem(x, ids):  # [T, n_embd], [T] -> [T, n_embd]
    return F.linear(F.silu(F.linear(x, w_gate)) * table[ids], w_down)


ids = torch.tensor([5, 9, 5])
print(stem(x, ids).shape)
print(f"multiplied: {3 * w_up.numel():,} numbers, with a table {2 * w_up.numel():,}")
print(f"in the table: {table.numel():,}, read for a token: {d_ff}")

# %% [markdown]
# ## 3. A linear layer is attention
#
# Embformer (Wu, 2025) has no linear layer at all, and its note says why none is needed
# (section 2.1): a linear layer already is attention, to its own inputs. Each input gets a weight,
# its share of the sum of sizes, and brings a value, its column of the matrix. Sign and sum go into
# the values. So a matrix holds values, and what holds values can be a table that is looked up:
# Embformer takes keys and values of attention from rows of the token, and the FFN's factor, too.

# %%


def linear_as_attention(x, w):  # [T, n_in], [n_out, n_in] -> [T, n_out]
    total = x.abs().sum(-1, keepdim=True)  # [T, 1]
    weights = x.abs() / total  # [T, n_in], of each token they add up to one
    values = w.T * (total * x.sign())[:, :, None]  # [T, n_in, n_out]
    return (weights[:, None] @ values)[:, 0]


difference = linear_as_attention(x, w_up) - F.linear(x, w_up)
print(f"largest difference: {difference.abs().max():.1e}")

# %% [markdown]
# ## 4. Train both
#
# Text about the world's 195 states, models of 6 layers x 128. In a minute, the one with tables has
# learned the facts, the dense one has not: see the share of `recall` that is printed.


# %%
def run(name, **flags):
    """The evaluations of a run with these flags of train.py."""
    if QUICK:
        flags.update(n_layer=2, n_embd=32, max_iters=2, eval_interval=2, eval_tokens=1024)
    flags.update(out_dir=OUT / name, overwrite=True)
    common.run(lambda: train(resolve_settings(**flags)))  # what is wrong with files is one line
    return read_run(OUT / name)["eval"]


for name in ("dense", "stem"):
    later = run(name, ffn=name)[1:]  # not the loss of random weights
    steps = [record["step"] for record in later]
    plt.plot(steps, [record["val_loss"] for record in later], marker=".", label=name)
plt.xlabel("step")
plt.ylabel("validation loss (nats per token)")
plt.legend()
plt.savefig(OUT / "tour.png")

# %% [markdown]
# ## 5. Swap two rows, and read
#
# Spain's rows and Germany's change places, in all tables. The prompt is the same, and so are all
# matrices; the model says Berlin. (`edit.py` takes names of several tokens, and changes one of
# the two.)

# %%
model, encoding, _ = load_model(OUT / "stem/ckpt.pt", torch.device("cpu"))
prompt = torch.tensor([encode(encoding, "Country: Spain\nThe capital city is called")])  # [1, T]


def answer():
    ids = model.generate(prompt, max_new_tokens=12, temperature=0)  # [1, T + 12]
    return encoding.decode(ids[0, 1:].tolist())


print(answer(), "\n")
spain = encoding.encode_single_token(" Spain")
germany = encoding.encode_single_token(" Germany")
for rows in model.tables.weight:  # [V, d_ff]
    rows[[spain, germany]] = rows[[germany, spain]]
print(answer())

# %% [markdown]
# ## 6. The table in RAM, or on disk
#
# A batch reads few rows, known in advance, and only these change. So tables may be where there is
# room, with a GPU for all else. Losses are the same.

# %%
losses = {}
for offload in ("none", "cpu", "disk"):
    losses[offload] = run(offload, offload=offload, max_iters=20)[-1]["val_loss"]
print(losses)

# %% [markdown]
# Next: a layer of your own, the end of README.md.
