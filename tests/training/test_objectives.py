"""Validation: the mean over the tokens that count, from batches that are always full."""

import pytest
import torch
from conftest import SHAPE

from model import Decoder, ModelConfig
from training.batches import Data
from training.objectives import NextToken, n_validation_rows, validate


@pytest.mark.parametrize("size", [1, 3, 64])
def test_validation_batches_are_full_and_the_mean_is_that_of_single_rows(data, size):
    """Another size would be compiled anew, with sizes that are symbols."""
    read = Data(str(data), "text", SHAPE["block_size"], seed=0, total=1)
    (source,) = read.val.values()
    torch.manual_seed(0)
    model = Decoder(ModelConfig(read.metas[0]["vocab_size"], **SHAPE))
    n_row = 8
    assert n_validation_rows(source, n_row * SHAPE["block_size"]) == n_row
    shapes = []

    class Noted(NextToken):
        def __call__(self, ids, targets):
            shapes.append(tuple(ids.shape))
            return super().__call__(ids, targets)

    objective = Noted(model, torch.device("cpu"), "float32")
    found = validate(objective, read, n_row * SHAPE["block_size"], size)
    assert shapes == [(size, SHAPE["block_size"])] * -(-n_row // size)

    total, n_target = 0.0, 0
    for number in range(n_row):
        ids, targets = source.rows([number])
        n = int((targets >= 0).sum())
        total += model.eval()(ids, targets)[1].item() * n
        n_target += n
    assert found["val_loss"] == pytest.approx(total / n_target, rel=1e-6)
