"""What a finished model shows beside its loss: facts that it recalls, a text that it continues."""

from pathlib import Path

import torch

from common import UserError
from model import Decoder
from text.tokenizer import END, encode
from training.batches import Conversations, Data
from training.questions import chat_recall, fact_recall

PROMPT = "Country: Spain\nThe capital city is called"


def ask(model: Decoder, data: Data) -> dict[str, float]:
    """Ask for what the corpus teaches. Prints and returns the shares that are right, with `recall`:
    {} if the corpus has no questions, or they do not fit the model."""
    corpus, of, shares = data.metas[0]["corpus"], (model.eval(), data.encoding, "capital"), {}
    try:
        if corpus == "countries":
            shares = dict(recall=fact_recall(*of))
        elif corpus in ("countries-sft", "countries-dpo"):
            shares = chat_recall(*of)
    except UserError as error:  # --block_size is less than a question needs
        print(f"capitals were not asked for: {error}")
    if shares:
        said = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in shares.items())
        print(f"capitals, asked in words it never saw: {said}")
    return shares


def show(model: Decoder, data: Data, ckpt: Path, seed: int) -> None:
    """Print what the model adds to the prompt of the corpus, or to a question from the validation
    conversations, and what to try next."""
    encoding, corpus, val = data.encoding, data.metas[0]["corpus"], next(iter(data.val.values()))
    if chat := isinstance(val, Conversations):
        ids, targets = val.conversation(0)
        ids, stop = ids[: (targets >= 0).argmax() + 1], encoding.encode_single_token(END)
        temperature = 0
    else:
        ids = encode(encoding, PROMPT if corpus == "countries" else "")
        stop, temperature = encoding.eot_token, 0.8
    prompt = torch.tensor([[*ids]], device=model.device)  # [1, T]
    text = model.generate(prompt, 60, temperature=temperature, stop=stop, seed=seed)[0].tolist()
    print(encoding.decode([token for token in text if token != encoding.eot_token]))
    print(f"\nnext:\n  python sample.py --ckpt {ckpt}{' --chat' if chat else ''}")
    if corpus == "countries" and len(model.tables.weight):
        print(f"  python edit.py --ckpt {ckpt} --source Spain --target Germany")
