"""The ids of texts: XXH64 with seed 0 over their UTF-8 bytes, the 64 bits taken as a signed integer.

It is the published hash of that name, so every implementation, in any language, gives the same ids for serving. Some
two texts of a column of n share an id with probability n^2 / 2^65: one in 37 million for a million texts.
"""

import numpy as np
import numpy.typing as npt

from emberscale_trainer.jit import kernel

_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5 = np.uint64(0x27D4EB2F165667C5)
_SEED_1 = np.uint64((0x9E3779B185EBCA87 + 0xC2B2AE3D27D4EB4F) % 2**64)
_SEED_4 = np.uint64(-0x9E3779B185EBCA87 % 2**64)
_ZERO = np.uint64(0)


def hash_bytes(content: bytes) -> int:
    """Returns the id of the bytes of a text."""
    data = np.frombuffer(content, dtype=np.uint8)
    return int(xxh64(data, 0, data.size))


@kernel
def _word(data: npt.NDArray[np.uint8], place: int) -> np.uint64:
    word = np.uint64(0)
    for byte in range(8):
        word |= np.uint64(data[place + byte]) << np.uint64(8 * byte)
    return word


@kernel
def _rotate(value: np.uint64, bits: int) -> np.uint64:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@kernel
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(lane + word * _PRIME_2, 31) * _PRIME_1


@kernel
def _merge(state: np.uint64, lane: np.uint64) -> np.uint64:
    return (state ^ _round(_ZERO, lane)) * _PRIME_1 + _PRIME_4


@kernel
def xxh64(data: npt.NDArray[np.uint8], begin: int, end: int) -> np.int64:
    """XXH64 of the bytes [begin, end), as a signed integer."""
    place = begin
    if end - begin >= 32:
        lane_1, lane_2, lane_3, lane_4 = _SEED_1, _PRIME_2, _ZERO, _SEED_4
        while place + 32 <= end:
            lane_1 = _round(lane_1, _word(data, place))
            lane_2 = _round(lane_2, _word(data, place + 8))
            lane_3 = _round(lane_3, _word(data, place + 16))
            lane_4 = _round(lane_4, _word(data, place + 24))
            place += 32
        state = _rotate(lane_1, 1) + _rotate(lane_2, 7) + _rotate(lane_3, 12) + _rotate(lane_4, 18)
        state = _merge(_merge(_merge(_merge(state, lane_1), lane_2), lane_3), lane_4)
    else:
        state = _PRIME_5
    state += np.uint64(end - begin)
    while place + 8 <= end:
        state = _rotate(state ^ _round(_ZERO, _word(data, place)), 27) * _PRIME_1 + _PRIME_4
        place += 8
    if place + 4 <= end:
        half = np.uint64(0)
        for byte in range(4):
            half |= np.uint64(data[place + byte]) << np.uint64(8 * byte)
        state = _rotate(state ^ (half * _PRIME_1), 23) * _PRIME_2 + _PRIME_3
        place += 4
    while place < end:
        state = _rotate(state ^ (np.uint64(data[place]) * _PRIME_5), 11) * _PRIME_1
        place += 1
    state ^= state >> np.uint64(33)
    state *= _PRIME_2
    state ^= state >> np.uint64(29)
    state *= _PRIME_3
    state ^= state >> np.uint64(32)
    return np.int64(state)


@kernel
def is_utf8(data: npt.NDArray[np.uint8], begin: int, end: int) -> bool:
    """Whether the bytes [begin, end) are UTF-8 (RFC 3629); the same text in another encoding has another id."""
    place = begin
    while place < end:
        lead = data[place]
        place += 1
        if lead < 0x80:
            continue
        low, high = 0x80, 0xBF
        if 0xC2 <= lead <= 0xDF:
            more = 1
        elif 0xE0 <= lead <= 0xEF:
            more = 2
            low, high = 0xA0 if lead == 0xE0 else 0x80, 0x9F if lead == 0xED else 0xBF
        elif 0xF0 <= lead <= 0xF4:
            more = 3
            low, high = 0x90 if lead == 0xF0 else 0x80, 0x8F if lead == 0xF4 else 0xBF
        else:
            return False
        if place + more > end:
            return False
        for _ in range(more):
            if data[place] < low or data[place] > high:
                return False
            low, high = 0x80, 0xBF
            place += 1
    return True


@kernel
def hash_texts(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.integer], into: npt.NDArray[np.int64]) -> None:
    """Writes the ids of the texts `data[offsets[i]:offsets[i + 1]]`."""
    for number in range(into.size):
        into[number] = xxh64(data, offsets[number], offsets[number + 1])
