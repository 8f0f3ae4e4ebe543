"""How a GPU copies a state to memory: next to training, and before anything changes it."""

import contextlib

import pytest
import torch

from lockstep.memory.copies import DeviceCopies


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU, and notes on which stream it is copied."""

    is_cuda = True


class Streams:
    """What copies ask of torch's streams, in order."""

    def __init__(self):
        self.calls = []
        self.current = Stream(self, "training")

    def stream(self, stream):
        @contextlib.contextmanager
        def entered():
            before = self.current
            self.current = stream
            yield
            self.current = before

        return entered()


class Stream:
    def __init__(self, streams, name):
        self.streams = streams
        self.name = name

    def wait_stream(self, other):
        self.streams.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.streams.calls.append(f"{self.name} waits for {event.name}")

    def record_event(self):
        return Event(self.streams)


class Event:
    name = "copies"

    def __init__(self, streams):
        self.streams = streams

    def synchronize(self):
        self.streams.calls.append("host waits for copies")


@pytest.fixture
def streams(monkeypatch):
    made = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(made, "side"))
    monkeypatch.setattr(torch.cuda, "stream", made.stream)

    class Target:
        def __init__(self, name):
            self.name = name

        def copy_(self, _source, non_blocking):
            assert non_blocking
            made.calls.append(f"{made.current.name} copies {self.name}")

    made.target = Target
    return made


def test_weights_are_copied_next_to_training_and_buffers_before_it_goes_on(streams):
    copies = DeviceCopies()
    weight = torch.ones(3).as_subclass(OnGPU)
    buffer = torch.ones(2).as_subclass(OnGPU)
    copies.updated = {weight.data_ptr()}
    targets = [streams.target(name) for name in ("weight", "buffer", "count")]
    copies.start(targets, [weight, buffer, torch.ones(1)])
    copies.hold_update()
    copies.wait()
    assert streams.calls == [
        "training copies buffer",
        "training copies count",
        "side waits for training",
        "side copies weight",
        "training waits for copies",
        "host waits for copies",
    ]


def test_without_a_gpu_nothing_waits(streams):
    copies = DeviceCopies()
    copies.start([streams.target("weight")], [torch.ones(3)])
    copies.hold_update()
    copies.wait()
    assert streams.calls == ["training copies weight"]
