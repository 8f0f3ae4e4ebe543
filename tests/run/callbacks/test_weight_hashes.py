import torch

from lockstep_gpt.run.callbacks.weight_hashes import digest


def test_the_checksum_of_weights_depends_on_names_types_shapes_and_bits():
    weight = torch.arange(6.0)
    models = [
        {"a": weight},
        {"b": weight},
        {"a": weight.view(2, 3)},
        {"a": weight.double()},
        {"a": weight.bfloat16()},
        {"a": torch.nextafter(weight, weight + 1)},
        {"a": weight, "b": torch.tensor(1)},
    ]
    sums = [digest(model) for model in models]
    assert len({*sums}) == len(models)
    assert digest({"a": torch.arange(12.0)[::2] / 2}) == sums[0]  # in any memory layout


def test_shards_of_a_model_have_no_checksum():
    assert digest({"a": torch.nn.Parameter(torch.ones(2))}) is None
