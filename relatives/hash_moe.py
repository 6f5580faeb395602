"""hash_moe: experts chosen by the token id, by a fixed random table (Hash Layers, Roller et al.,
2021): the sparse baseline of the STEM paper, there with one expert per token (--top_k 1). A token
costs the FLOPs of the dense FFN."""

from collections.abc import Iterator

import torch
from torch import Tensor

import model
from relatives.moe import ExpertConfig, Experts
from tables.tables import Tables, send


class HashMoEFFN(Experts):
    """A "random hash" of the token id (section 3.1). With top_k above 1 the hidden units come in
    top_k segments, each by a hash of its own out of n_expert / top_k (section 3.2, "MultiHash").

    Differs: SwiGLU without biases for the ReLU FFN; every expert has equally many ids; experts are
    in every layer, not in one or a few. MultiHash cuts the second matrix by its outputs, each of
    which reads all hidden units; here a segment has its own hidden units alone, and outputs are
    summed."""

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__(config)
        self.row_width = self.top_k  # a token's "row" is the numbers of its experts
        size = self.n_expert // self.top_k  # experts for a segment
        hashes = []
        for segment in range(self.top_k):
            expert = torch.randperm(config.vocab_size) % size  # equally many ids for each
            hashes.append(segment * size + expert)
        self.register_buffer("hashes", torch.stack(hashes, dim=-1))  # [V, top_k]

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x [B, T, n_embd], numbers of experts [B, T, top_k] -> [B, T, n_embd]."""
        return self.experts(x, chosen).sum(-2)


class Decoder(model.Decoder):
    """Its rows are the numbers of a token's experts, which nobody trains: there are no tables."""

    config_class = ExpertConfig

    def make_block(self, layer: int) -> model.Block:
        qkv = model.LinearQKV(self.config)
        return model.Block(self.config, layer, qkv, HashMoEFFN(self.config))

    def make_tables(self, tables, widths: list[int]) -> Tables:
        return super().make_tables(tables, [])

    def layer_rows(self, addresses: Tensor) -> Iterator[Tensor]:
        for block in self.blocks:
            yield block.ffn.hashes[send(addresses, self.device)]  # [B, T, top_k]
