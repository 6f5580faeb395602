"""What a finished model shows beside its loss: facts that it recalls, a text that it continues."""

import torch

from common import UserError
from model import Decoder
from text.template import END, special
from text.tokenizer import encode
from training.batches import Conversations, Data
from training.questions import chat_recall, fact_recall

# What to try with the models of a corpus: a text to continue, and commands.
PROMPTS = {"countries": "Country: Spain\nThe capital city is called"}
SAMPLE, EDIT = "sample.py --ckpt {ckpt}", "edit.py --ckpt {ckpt}"
COMMANDS = {
    "countries": (SAMPLE + ' --prompt "Country: Peru"', EDIT + " --source Spain --target Germany")
}


def ask(model: Decoder, data: Data) -> dict[str, float]:
    """Ask for what the corpus teaches. Prints and returns the shares that are right, with `recall`:
    {} if the corpus has no questions, or they do not fit the model."""
    corpus, of, shares = data.metas[0]["corpus"], (model.eval(), data.encoding, "capital"), {}
    try:
        if corpus == "countries":
            shares = dict(recall=fact_recall(*of))
            print(f"capitals recalled on phrasings it never saw: {shares['recall']:.1%}")
        elif corpus in ("countries-sft", "countries-dpo"):
            shares = chat_recall(*of)
            told = (f"{name.replace('_', ' ')} {share:.1%}" for name, share in shares.items())
            print("capitals named in a chat, asked in new words: " + ", ".join(told))
    except UserError as error:  # --block_size is less than a question needs
        print(f"capitals were not asked for: {error}")
    return shares


def continued(model: Decoder, data: Data, seed: int) -> str:
    """The prompt of the corpus, or a question from the validation conversations, and what the model
    adds to it."""
    encoding, val = data.encoding, next(iter(data.val.values()))
    if isinstance(val, Conversations):
        ids, targets = val.conversation(0)
        ids, stop, temperature = ids[: (targets >= 0).argmax() + 1], special(encoding, END), 0
    else:
        ids = encode(encoding, PROMPTS.get(data.metas[0]["corpus"], ""))
        stop, temperature = encoding.eot_token, 0.8
    prompt = torch.tensor([[*ids]], device=model.device)  # [1, T]
    text = model.generate(prompt, 60, temperature=temperature, stop=stop, seed=seed)[0].tolist()
    return encoding.decode([token for token in text if token != encoding.eot_token])


def next_commands(model: Decoder, data: Data) -> list[str]:
    """What to try next with a {ckpt}."""
    if isinstance(next(iter(data.val.values())), Conversations):
        return [SAMPLE + " --chat"]
    commands = COMMANDS.get(data.metas[0]["corpus"], (SAMPLE,))
    return [each for each in commands if len(model.tables.weight) or EDIT not in each]
