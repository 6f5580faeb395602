"""Which parameters there are. The whole model: test_attention.py; the note's claim about linear
layers: test_tour.py."""

from naive import decoder


def test_every_parameter_is_the_input_embedding_or_a_table():
    model = decoder(ffn="embformer")
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    assert shapes.pop("wte.weight") == (23, 32)
    assert sorted(shapes) == ["tables.weight.0", "tables.weight.1", "tables.weight.2"]
    assert set(shapes.values()) == {(23, 3 * 32)}  # K | V | F
