"""Ask a model what it knows: does greedy decoding write the whole answer, word for word? And what a
finished run shows beside its loss."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common import UserError
from model import Decoder
from text import countries, tokenizer
from text.tokenizer import encode
from training.batches import Conversations, Data


@torch.inference_mode()
def score_answers(
    model: Decoder,
    prompts: list[list[int]],
    answers: list[list[int]],
    table_prompts: list[list[int]] | None = None,
    temperature: float = 1.0,
    barred: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Does greedy decoding continue prompts (token ids) with these answers? One forward pass tells:
    if each token of the answer is the most probable one after the prompt and those before.

    Rows are looked up under `table_prompts`, if given. `barred` is a token that no answer may begin
    with; the others share its probability. Returns greedy [N] bool, the probability of sampling the
    whole answer [N], and the logits [N, T, V]. UserError: longer than block_size.
    """
    last = [len(prompt) - 1 for prompt in prompts]  # the position that predicts an answer

    def padded(before: list[list[int]], after: list[list[int]], filler: int) -> Tensor:  # [N, T]
        rows = [torch.tensor([*a, *b]) for a, b in zip(before, after, strict=True)]
        return pad_sequence(rows, batch_first=True, padding_value=filler).to(model.device)

    ids = padded(prompts, answers, 0)
    if ids.shape[1] > (block_size := model.config.block_size):
        raise UserError(f"prompt and answer have {ids.shape[1]} tokens, block_size is {block_size}")
    # The model is causal, so no answer sees the padding.
    logits, _ = model(ids, table_ids=padded(table_prompts or prompts, answers, 0))  # [N, T, V]
    if barred is not None:
        logits[range(len(prompts)), last, barred] = -torch.inf
    targets = padded([[-1] * n for n in last], [[*answer, -1] for answer in answers], -1)
    wanted = targets >= 0  # where the next token is one of an answer's
    greedy = ((logits.argmax(-1) == targets) | ~wanted).all(1)
    predicted = logits[wanted].float() / temperature  # [n, V]
    losses = torch.zeros(targets.shape, device=ids.device)  # [N, T]
    losses[wanted] = F.cross_entropy(predicted, targets[wanted], reduction="none")
    return greedy, losses.sum(1).neg().exp(), logits


def groups(encoding: tiktoken.Encoding, asked: list[tuple]) -> Iterator[list[list]]:
    """The columns of `asked`, so many rows at a time that logits [N, T, V] take about a GB."""
    size = max(1, min(256, 2**22 // encoding.n_vocab))
    for start in range(0, len(asked), size):
        yield [list(column) for column in zip(*asked[start : start + size], strict=True)]


def fact_recall(model: Decoder, encoding: tiktoken.Encoding, relation: str) -> float:
    """Share of held-out questions that greedy decoding answers in full: about a relation of every
    country, two phrasings in each of three forms."""
    asked = [
        (encode(encoding, question.prompt), encoding.encode_ordinary(question.answer))
        for country in countries.table()
        for form in countries.FORMS
        for question in countries.questions(relation, form, country)
    ]
    right = sum(score_answers(model, *group)[0].sum().item() for group in groups(encoding, asked))
    return right / len(asked)


def chat_questions(encoding: tiktoken.Encoding, relation: str) -> list[tuple[list[int], ...]]:
    """Held-out questions of a conversation: prompt, brief answer and sentence as token ids."""
    asked = []
    for country in countries.table():
        for pattern in countries.held_out(countries.QUESTION, relation):
            fact = (pattern, country, relation)
            talks = [countries.exchange(*fact, brief) for brief in (True, False)]
            prompt = tokenizer.prompt(encoding, talks[0][:1])
            # What follows it, without the line break at the end.
            answers = [tokenizer.render(encoding, talk)[len(prompt) : -1] for talk in talks]
            asked.append(([encoding.eot_token, *prompt], *answers))
    return asked


def chat_recall(model: Decoder, encoding: tiktoken.Encoding, relation: str) -> dict[str, float]:
    """Ask in a conversation for a fact of every country, in held-out words, and judge each style
    of answer by itself: brief ("Lima.", never with " The") and a sentence ("The answer is Lima."):

        recall, recall_brief, recall_sentence: share of the questions that greedy decoding answers
            rightly: left to itself, kept from beginning with " The", made to begin with it.
        sampled, sampled_brief, sampled_sentence: probability that a sample at temperature 0.8 is
            right: of all, of brief ones, of sentences.
        sentences: probability that a sample is a sentence.
    """
    asked, sums = chat_questions(encoding, relation), 0
    score, the = partial(score_answers, model, temperature=0.8), asked[0][2][0]  # " The"
    for prompts, briefs, sentences in groups(encoding, asked):
        begins, p_the, _ = score(prompts, [[the]] * len(prompts))
        brief, p_brief, _ = score(prompts, briefs, barred=the)
        sentence, p_sentence, _ = score([[*p, the] for p in prompts], [s[1:] for s in sentences])
        right = [torch.where(begins, sentence, brief), brief, sentence]
        right += [(1 - p_the) * p_brief, p_the * p_sentence]  # in one style, and right
        sums += torch.stack([*right, p_the]).cpu().double().sum(1)
    recall, recall_brief, recall_sentence, brief, sentence, p_the = (sums / len(asked)).tolist()
    return dict(
        recall=recall,
        recall_brief=recall_brief,
        recall_sentence=recall_sentence,
        sampled=brief + sentence,
        sampled_brief=brief / max(1 - p_the, 1e-9),
        sampled_sentence=sentence / max(p_the, 1e-9),
        sentences=p_the,
    )


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
        ids, temperature = ids[: (targets >= 0).argmax() + 1], 0
        stop = encoding.encode_single_token(tokenizer.END)
    else:
        prompt = "Country: Spain\nThe capital city is called" if corpus == "countries" else ""
        ids, temperature, stop = encode(encoding, prompt), 0.8, encoding.eot_token
    prompt = torch.tensor([[*ids]], device=model.device)  # [1, T]
    text = model.generate(prompt, 60, temperature=temperature, stop=stop, seed=seed)[0].tolist()
    print(encoding.decode([token for token in text if token != encoding.eot_token]))
    print(f"\nnext:\n  python sample.py --ckpt {ckpt}{' --chat' if chat else ''}")
    if corpus == "countries" and len(model.tables.weight):
        print(f"  python edit.py --ckpt {ckpt} --source Spain --target Germany")
