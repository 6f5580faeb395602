"""Pairs of answers: their corpus, and what of a long one is learned."""

from conftest import command, flags, says, write_jsonl

from text import countries
from training.batches import Data


def test_the_corpus_is_shuffled():
    names = [country.name for country in countries.table()]
    for pairs in countries.preferences(3):  # evaluation reads some of the first
        early = " ".join(chosen[0]["content"] for chosen, _ in pairs[:512])
        assert sum(name in early for name in names) > 0.8 * len(names)


def test_of_long_pairs_only_the_last_answers_are_learned_to_their_ends(data, tmp_path):
    """However much of the conversation before them is cut."""
    talk = [says("user", "Who?")]
    for _ in range(12):
        talk += [says("assistant", "Anna meets Anna."), says("user", "Who?")]
    records = []
    for n in range(1, 30):
        chosen = [*talk, says("assistant", "Chloë sees" + " Björn" * (n % 4))]
        records.append({"chosen": chosen, "rejected": [*talk, says("assistant", "Anna")]})
    path = write_jsonl(tmp_path / "p.jsonl", records)
    out = tmp_path / "pairs"
    made = flags(tokenizer=data, val_fraction=0.3, out_dir=out)
    command("prepare.py", "--input", path, *made)
    pairs = Data(str(out), "preference", block_size=64, seed=None, total=10)
    assert pairs.train.n_cut
    for both in pairs.train.batch(0, 8)[1]:  # [2, T]
        yes, no = (pairs.encoding.decode(side[side >= 0].tolist()) for side in both)
        assert yes.startswith(" Chloë sees") and yes.endswith("<|im_end|>")
        assert no == " Anna<|im_end|>"
