import threading
import time
from itertools import islice

import pytest

from lockstep_gpt.data.feeding import Feed, TokenStream
from lockstep_gpt.data.order import Order
from lockstep_gpt.data.windows import StreamWindows

T, B, SEED = 8, 3, 5


@pytest.mark.parametrize("count", [1, 8, 20])
def test_a_stream_gathers_the_windows_of_each_batch(folder, count):
    order = Order(SEED, 99, B, 0, 1, start=4 * B)
    windows = StreamWindows(folder, "train", T)
    stream = TokenStream(windows, order)
    for _ in range(2):  # each iteration begins again
        batches = islice(stream, count)
        for stored, rows in zip(batches, islice(order, count), strict=True):
            assert stored.ids.tolist() == windows[rows].tolist()


def test_a_feed_loads_one_batch_ahead_and_measures_waiting(wait_for):
    made, threads = [], set()

    def slow():
        for number in range(3):
            time.sleep(0.05 if made else 0.5)
            made.append(number)
            threads.add(threading.current_thread().name)
            yield number

    feed = Feed(slow(), group=1)
    batches, started = iter(feed), time.perf_counter()
    assert next(batches) == 0
    spent = time.perf_counter() - started
    wait_for(lambda: len(made) > 1)
    time.sleep(0.1)  # long enough for another one
    assert made == [0, 1]
    started = time.perf_counter()
    assert list(batches) == [1, 2]
    # Less than the 0.5 s of the first: a busy machine may suspend this thread before it waits.
    assert 0.1 < feed.waited < spent + time.perf_counter() - started
    assert all(name.startswith("feed") for name in threads)


def test_an_error_in_the_feed_s_thread_stops_the_training():
    with pytest.raises(ZeroDivisionError):
        list(Feed(1 // (1 - number) for number in range(3)))
