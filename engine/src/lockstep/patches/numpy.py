"""What the project knows of NumPy beyond its documentation."""

import ctypes

import numpy as np

# Bytes of the state of MT19937, NumPy's global generator: 624 words and a place among them.
STATE_BYTES = 625 * 4


def random_state() -> bytes:
    """Return what changes when `np.random` draws.

    `np.random.get_state` takes 20 times as long: it makes a number of each word.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in its stubs
    if not isinstance(generator, np.random.MT19937):  # somebody has put another one in its place
        return repr(generator.state).encode()
    return ctypes.string_at(generator.ctypes.state_address, STATE_BYTES)
