import threading
import time

import pytest

from lockstep.loading.feeding import Feed


def test_a_feed_loads_one_batch_ahead(wait_for):
    made, threads = [], set()

    def slow():
        for number in range(3):
            time.sleep(0.05 if made else 0.5)
            made.append(number)
            threads.add(threading.current_thread().name)
            yield number

    feed = Feed(slow(), group=1)
    batches = iter(feed)
    assert next(batches) == 0
    wait_for(lambda: len(made) > 1)
    time.sleep(0.1)  # long enough for another one
    assert made == [0, 1]
    assert list(batches) == [1, 2]
    assert all(name.startswith("feed") for name in threads)


def test_an_error_in_the_feed_s_thread_stops_the_training():
    with pytest.raises(ZeroDivisionError):
        list(Feed(1 // (1 - number) for number in range(3)))
