"""A plan of modules that aren't ours: GPT-2 of transformers, and a ResNet-50."""

import doctest
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lockstep_gpt.gpt import GPT
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import lockstep
from lockstep.batch import Batch
from lockstep.errors import UserError
from lockstep.plan.counting import Device
from lockstep.plan.hardware import GB, HARDWARE, Link
from lockstep.plan.memory import Activations
from lockstep.plan.prediction import predict
from lockstep.plan.step_time import simple_seconds
from lockstep.plan.table import as_text
from lockstep.plan.training import Training


def classes(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


class Bottleneck(nn.Module):
    """He et al. 2016, figure 5, with the stride in the 3 x 3 convolution, as torchvision has it."""

    def __init__(self, channels, width, stride):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or channels != 4 * width:
            narrow = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(narrow, nn.BatchNorm2d(4 * width))

    def forward(self, x):
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet50():
    """He et al. 2016, table 1."""
    stem = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    parts, channels = [*stem, nn.MaxPool2d(3, 2, padding=1)], 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(depth):
            stride = 2 if number == 0 and width > 64 else 1
            parts.append(Bottleneck(channels, width, stride))
            channels = 4 * width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


@pytest.fixture(scope="module")
def images():
    """A ResNet-50 with SGD and momentum, and 256 images a step."""
    with torch.device("meta"):
        model = resnet50()
    example = torch.empty(1, 3, 224, 224), torch.empty(1, dtype=torch.int64)
    momentum = torch.optim.SGD
    return Training(
        model,
        example,
        Batch(global_size=256),
        classes,
        lambda weights: momentum(weights, momentum=0.9),
    )


def test_a_resnet_50_has_the_published_size(images):
    assert images.parameters == 25_557_032  # torchvision's
    # 4.09 billion multiplications and additions in forward (torchvision's table of its weights).
    assert images.flops == pytest.approx(3 * 2 * 4.09e9, rel=0.01)
    states = images.states
    assert states.gradients == states.optimizer == 4 * 25_557_032
    assert 0 < states.weights - states.gradients < 1e6  # the averages in BatchNorm


@pytest.mark.parametrize(("gigabytes", "share"), [(16, 0.11), (300, 0.006)])
def test_gradients_of_a_resnet_50_take_the_tutorial_s_share_of_a_step(images, gigabytes, share):
    """About 100 MB of gradients beside 50 ms of forward and backward, over PCIe and NVLink."""
    link = Link("link", gigabytes * GB, latency=0.0, source="")
    hardware = replace(HARDWARE["a100-80"], intra=link, link_efficiency=1.0)
    (row,) = predict(images, hardware, (2,)).rows  # two ranks send every byte once
    seconds = row.time.all_reduce
    assert seconds == pytest.approx(simple_seconds(4 * 25_557_032, gigabytes * GB))
    assert seconds / (0.050 + seconds) == pytest.approx(share, rel=0.14)  # a digit in the source


def test_a_resnet_50_keeps_what_its_convolutions_return_twice(images):
    """As the input of a norm, and after the norm as that of the next convolution."""
    outputs = 11.1e6  # of all convolutions (Radosavovic et al. 2020, table 2), in float32
    *_, line = Activations.of(images, Device("cuda", 80e9)).many
    assert line.slope == pytest.approx(2 * 4 * outputs, rel=0.1)


@pytest.fixture(scope="module")
def gpt2():
    """GPT-2 of transformers and ours, without dropout."""
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    tokens = torch.empty(1, 1024, dtype=torch.int64)
    with torch.device("meta"):
        theirs, ours = GPT2LMHeadModel(config), GPT(50_257, 1024, 12, 12, 768)
    known = {"batch": Batch(global_size=64, micro_size=8), "precision": "bf16-mixed"}
    return (
        Training(
            theirs,
            {"input_ids": tokens, "labels": tokens},
            loss=lambda model, batch: model(**batch).loss,
            blocks=theirs.transformer.h,
            **known,
        ),
        Training(ours, (tokens, tokens), **known),
    )


def test_gpt2_of_transformers_is_planned_like_ours(gpt2):
    theirs, ours = gpt2
    assert theirs.parameters == 124_439_808  # Radford et al. 2019
    assert theirs.flops == pytest.approx(ours.flops, rel=0.01)
    plans = [predict(each, "h100", (1, 8)) for each in gpt2]
    for row, of_ours in zip(*(plan.rows for plan in plans), strict=True):
        assert row.time.total == pytest.approx(of_ours.time.total, rel=0.05)
        assert row.memory.total > of_ours.memory.total  # all logits, and a float32 stream
    shards = [predict(replace(each, strategy="fsdp2"), "h100", (8,)).rows[0] for each in gpt2]
    assert shards[0].time.all_reduce == pytest.approx(shards[1].time.all_reduce, rel=0.05)


def test_a_step_that_depends_on_values_is_refused_in_one_line():
    training = Training(
        nn.Linear(4, 1, device="meta"),
        torch.empty(1, 4),
        Batch(micro_size=1),
        lambda model, x: model(x).sum() * x.sum().item(),
    )
    with pytest.raises(UserError, match="the step of Linear depends on the values of tensors"):
        predict(training)
    with pytest.raises(UserError, match=r"loss returned shape \(2, 1\), and must return"):
        predict(Training(training.model, training.example, training.batch))


def test_a_table_of_samples_has_no_columns_of_tokens(images):
    text = as_text(predict(images, "a100-80", (1, 8), samples=90 * 1.28e6, price=2))
    head = text.split("one optimizer step, ms\n")[1].splitlines()[0]
    assert "samples/s" in head
    assert head.split()[-2:] == ["time", "cost"]
    assert not {"token", "lr", "vocabulary"} & {*text.split()}


@pytest.mark.parametrize("documented", [Training, predict])
def test_the_examples_of_plans_are_right(documented):
    names = {"torch": torch, "nn": nn, "F": F, "lockstep": lockstep, **globals()}
    (example,) = doctest.DocTestFinder(recurse=False).find(documented, globs=names)
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0
