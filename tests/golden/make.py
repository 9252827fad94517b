"""Write the golden files: `python tests/golden/make.py`. Uses tests/ref/frame_ref.py, not the library.

Each line is a name, a space and bytes in hex.

good.hex: NAME is an encoded array. NAME.VERB, after it, is the destination after the array was decoded to it with
that verb. Before, byte i of the destination is i % 251. It has the dtype of the first frame, and as many elements as
all frames together.

delta_good.hex: NAME is a frame of version 2 (docs/FORMAT.md 11). NAME.base is the base and NAME.x the array.
delta_bad.hex: rNN_NAME breaks rule NN of docs/FORMAT.md 11.3.

bad.hex: rNN_NAME breaks rule NN of docs/FORMAT.md 4. Arrays of rules 1 to 28 are refused for any destination. Those of
rules 29 to 31 are refused for a destination of 10 elements of float32 with verb set.
"""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "ref"))
import delta_ref  # noqa: E402
import frame_ref as ref  # noqa: E402


def pattern(n_bytes: int) -> bytes:
    return bytes(i % 251 for i in range(n_bytes))


def floats(n: int, listed: dict[int, float]) -> bytes:
    return b"".join(struct.pack("<f", listed.get(i, 0.0)) for i in range(n))


def sparse(n: int, dtype: str, density: float, seed: int, small: bool = False) -> bytes:
    """An array [n] of dtype with about that density. With `small`, every float is finite."""
    rng = random.Random(seed)
    e = ref.DTYPES[ref.DTYPE_NUMBERS[dtype]][1]
    out = bytearray(n * e)
    for i in range(n):
        if rng.random() < density and i % 256 != 77:
            raw = bytearray(rng.randbytes(e))
            raw[0] |= 1
            if small and e > 1:
                raw[-1] = 0x3C
            out[i * e : (i + 1) * e] = raw
    return bytes(out)


EXAMPLE = floats(300, {3: 1.0, 66: -2.0, 258: 0.5})  # the example of docs/FORMAT.md 7
EXAMPLE_BASE = floats(300, {3: 1.0, 66: 1.0})
EXAMPLE_NEW = floats(300, {66: 1.0, 258: 0.5})


def special_bits() -> bytes:
    """float32: -0.0, quiet and signalling NaNs with payload, infinities, denormals; one every 97 elements."""
    words = [0x80000000, 0x7FC00001, 0x7F800001, 0xFFABCDEF, 0x7F800000, 0xFF800000, 0x00000001, 0x807FFFFF]
    out = bytearray(4 * 777)
    for i, word in enumerate(words):
        struct.pack_into("<I", out, 4 * (i * 97), word)
    return bytes(out)


def good() -> dict[str, bytes]:
    files = {}
    for fmt in ref.FORMATS[1:]:
        files[f"example_{fmt}"] = ref.encode(fmt, "float32", EXAMPLE)
        files[f"special_bits_{fmt}"] = ref.encode(fmt, "float32", special_bits())
        files[f"one_element_{fmt}"] = ref.encode(fmt, "float32", floats(1, {0: 7.0}))
        for dtype, seed in zip(ref.DTYPE_NUMBERS, range(100), strict=False):
            if fmt != "dense":
                files[f"all_dtypes_{fmt}_{dtype}"] = ref.encode(
                    fmt, dtype, sparse(333, dtype, 0.1, seed, small=True)
                )
    for fmt in ("tile", "pici", "coo"):
        files[f"delta_{fmt}"] = ref.encode(fmt, "float32", EXAMPLE_NEW, EXAMPLE_BASE)
        files[f"none_listed_{fmt}"] = ref.write_frame(fmt, "float32", 300, {})
        files[f"zero_listed_{fmt}"] = ref.write_frame(fmt, "float32", 300, {5: bytes(4), 290: b"\1\2\3\4"})
        files[f"tile_edges_{fmt}"] = ref.encode(fmt, "uint8", sparse(4096 + 257, "uint8", 0.3, 5))
    files["example_empty"] = ref.encode("empty", "float32", bytes(1200))
    files["nothing_empty"] = ref.write_frame("empty", "float64", 0, {})
    files["empty_delta"] = ref.write_frame("empty", "float32", 20, {}, is_delta=True)
    files["all_listed_pici"] = ref.encode("pici", "uint8", bytes(i % 255 + 1 for i in range(4097)))
    files["all_listed_coo"] = ref.encode("coo", "uint8", bytes(i % 255 + 1 for i in range(257)))
    files["block_of_255_tile"] = ref.encode(
        "tile", "int8", bytes(0 if i == 255 else 9 for i in range(512 - 1))
    )
    files["last_element_only_pici"] = ref.encode("pici", "int16", bytes(2 * 8192 - 1) + b"\x7f")
    files["last_element_only_tile"] = ref.encode("tile", "int16", bytes(2 * 512 - 1) + b"\x7f")
    files["array_of_all_formats"] = b"".join(
        ref.encode(fmt, "int32", sparse(n, "int32", 0.0 if fmt == "empty" else 0.2, n))
        for fmt, n in (("pici", 100), ("empty", 50), ("tile", 300), ("dense", 3), ("coo", 64), ("tile", 1))
    )
    files["array_with_nothing_between"] = (
        ref.encode("coo", "int64", sparse(9, "int64", 0.5, 1))
        + ref.write_frame("empty", "int64", 0, {})
        + ref.encode("dense", "int64", sparse(9, "int64", 0.5, 2))
    )
    files["array_delta_and_not"] = ref.encode("coo", "float32", EXAMPLE_NEW, EXAMPLE_BASE) + ref.encode(
        "dense", "float32", floats(5, {1: 1.0})
    )
    return files


def put(frame: bytes, at: int, fmt: str, value: int) -> bytes:
    out = bytearray(frame)
    struct.pack_into(fmt, out, at, value)
    return bytes(out)


def bad() -> dict[str, bytes]:
    tile, pici, coo, dense = (ref.encode(fmt, "float32", EXAMPLE) for fmt in ("tile", "pici", "coo", "dense"))
    empty = ref.encode("empty", "float32", bytes(1200))
    ten = ref.encode("coo", "float32", floats(10, {4: 1.0}))
    return {
        "r01_header_cut_off": tile[:63],
        "r01_one_byte_after_the_last_frame": tile + b"\0",
        "r02_magic": put(tile, 0, "B", ord("s")),
        "r02_zeros_after_the_last_frame": tile + bytes(64),
        "r03_version_0": put(tile, 4, "B", 0),
        "r03_version_3": put(tile, 4, "B", 3),
        "r04_format_5": put(tile, 5, "B", 5),
        "r05_dtype_0": put(tile, 6, "B", 0),
        "r05_dtype_11": put(tile, 6, "B", 11),
        "r06_flag_bit_1": put(tile, 7, "B", 2),
        "r07_reserved": put(tile, 56, "<Q", 1 << 63),
        "r08_n_elems_above_2_31": put(empty, 8, "<Q", 2**31 + 1),
        "r08_n_elems_2_64": put(empty, 8, "<Q", 2**64 - 1),
        "r09_nnz_above_n_elems": put(coo, 16, "<Q", 301),
        "r10_tile_of_nothing": put(put(tile, 8, "<Q", 0), 16, "<Q", 0),
        "r10_dense_of_nothing": put(put(dense, 8, "<Q", 0), 16, "<Q", 0),
        "r11_empty_with_nnz": put(empty, 16, "<Q", 1),
        "r12_dense_with_fewer": put(dense, 16, "<Q", 3),
        "r13_dense_delta": put(dense, 7, "B", 1),
        "r14_index_off": put(tile, 32, "<Q", 80),
        "r14_index_off_in_dense": put(dense, 32, "<Q", 64),
        "r15_meta_off": put(pici, 40, "<Q", 96),
        "r15_meta_off_in_coo": put(coo, 40, "<Q", 80),
        "r16_values_off": put(tile, 48, "<Q", 2**64 - 16),
        "r16_values_off_in_empty": put(empty, 48, "<Q", 64),
        "r17_frame_bytes_too_large": put(tile, 24, "<Q", 128),
        "r17_frame_bytes_too_small": put(tile, 24, "<Q", 96),
        "r17_frame_bytes_0": put(empty, 24, "<Q", 0),
        "r18_cut_off": tile[:-1],
        "r18_cut_off_after_header": dense[:64],
        "r18_second_frame_cut_off": tile + pici[:-16],
        "r19_padding_after_index": put(tile, 66, "B", 1),
        "r19_padding_after_meta": put(tile, 83, "B", 1),
        "r19_padding_after_values": put(coo, len(coo) - 1, "B", 1),
        "r20_tile_counts_too_high": put(tile, 64, "B", 3),
        "r20_tile_counts_too_low": put(tile, 65, "B", 0),
        "r21_tile_offset_twice": put(tile, 81, "B", 3),
        "r21_tile_offsets_fall": put(tile, 80, "B", 200),
        "r21_tile_falls_swapped_with_border": put(tile, 64, "<H", 0x0201),
        "r22_tile_offset_past_the_end": put(tile, 82, "B", 44),
        "r23_pici_first_prefix": put(pici, 64, "<I", 1),
        "r23_pici_second_prefix": put(ref.encode("pici", "uint8", bytes([1] * 4097)), 68, "<I", 4095),
        "r24_pici_bit_too_many": put(pici, 80, "<Q", 1),
        "r24_pici_bit_too_few": put(pici, 80 + 3 * 8, "<Q", 0),
        "r25_pici_bit_past_the_end": put(pici, 80 + 3 * 8, "<Q", 1 << 63),
        "r25_pici_bit_just_past_the_end": put(pici, 80 + 44 * 8, "<Q", 1 << 4)[:80 + 3 * 8] + bytes(8)
        + put(pici, 80 + 44 * 8, "<Q", 1 << 4)[80 + 4 * 8:],
        "r26_coo_twice": put(coo, 68, "<I", 3),
        "r26_coo_falls": put(coo, 64, "<I", 299),
        "r27_coo_past_the_end": put(coo, 72, "<I", 300),
        "r27_coo_far_past_the_end": put(coo, 72, "<I", 2**32 - 1),
        "r28_no_bytes": b"",
        "r29_other_dtype": ref.encode("coo", "int32", floats(10, {4: 1.0})),
        "r29_other_dtype_in_second_frame": ref.encode("coo", "float32", floats(5, {4: 1.0}))
        + ref.encode("empty", "int32", bytes(20)),
        "r30_too_few": ref.encode("coo", "float32", floats(9, {4: 1.0})),
        "r30_too_many": ten + ref.write_frame("empty", "float32", 1, {}),
        "r30_far_too_many": ref.write_frame("empty", "float32", 2**31, {}),
        "r31_delta": ref.encode("coo", "float32", floats(10, {4: 1.0}), bytes(40)),
        "r31_empty_delta": ref.write_frame("empty", "float32", 10, {}, is_delta=True),
    }  # fmt: skip


def changed(n: int, dtype: str, density: float, seed: int, most: int = 2**64) -> tuple[bytes, bytes]:
    """(base, x): about that density of the elements differs, by at most `most`."""
    rng = random.Random(seed)
    e = ref.DTYPES[ref.DTYPE_NUMBERS[dtype]][1]
    base = [rng.randrange(2 ** (8 * e)) for _ in range(n)]
    x = [(v + rng.randint(-most, most)) % 2 ** (8 * e) if rng.random() < density else v for v in base]
    return tuple(b"".join(v.to_bytes(e, "little") for v in a) for a in (base, x))  # type: ignore[return-value]


DELTA_BASE = struct.pack("<300H", *[0x3F80] * 300)  # the example of docs/FORMAT.md 11.5
_NEW = {3: 0x3F81, 66: 0x3F7F, 130: 0x3F82, 258: 0x4000, 299: 0x3F81}
DELTA_NEW = struct.pack("<300H", *[_NEW.get(i, 0x3F80) for i in range(300)])


def delta_good() -> dict[str, tuple[str, bytes, bytes, int | None]]:
    """name -> (dtype, base, x, code)."""
    files: dict[str, tuple[str, bytes, bytes, int | None]] = {
        "example": ("bfloat16", DELTA_BASE, DELTA_NEW, None),
        "nothing": ("float32", b"", b"", None),
        "no_change": ("float64", bytes(800), bytes(800), None),
        "one_element": ("int8", b"\x00", b"\x80", None),
        "all_changed": ("float8", bytes(100), bytes(range(1, 101)), None),
    }
    for dtype, seed in zip(ref.DTYPE_NUMBERS, range(100), strict=False):
        for code in (0, None):
            files[f"all_dtypes_{dtype}_{code}"] = (dtype, *changed(333, dtype, 0.1, seed, 5), code)
    for code in range(5):
        files[f"codes_{code}"] = ("int32", *changed(500, "int32", 0.04, code, 3 * 4 ** (2**code)), code)
    for density in (0.24, 0.26, 0.5):
        files[f"bitmap_or_not_{density}"] = ("uint8", *changed(1000, "uint8", density, 3, 2), None)
    files["two_slices"] = ("uint8", *changed(65536 + 700, "uint8", 0.001, 3, 2), None)
    return files


def delta_bad() -> dict[str, bytes]:
    frame = delta_ref.encode("bfloat16", DELTA_NEW, DELTA_BASE)  # table at 32, low 40, high 44, codes 48, value 52
    raw = delta_ref.encode("bfloat16", DELTA_NEW, DELTA_BASE, 0)  # 5 values from 48 on, 2 bytes of padding
    ten = delta_ref.encode("uint8", bytes(range(10)), bytes(10))  # a bitmap at 40, 9 values from 44 on
    two = delta_ref.encode("uint8", bytes(65535) + b"\1\1", bytes(65537), 0)
    return {
        "r01_header_cut_off": frame[:31],
        "r02_magic": put(frame, 0, "B", ord("s")),
        "r03_version_1": put(frame, 4, "B", 1),
        "r03_version_3": put(frame, 4, "B", 3),
        "r04_format_4": put(frame, 5, "B", 4),
        "r05_dtype_0": put(frame, 6, "B", 0),
        "r05_dtype_11": put(frame, 6, "B", 11),
        "r06_flags_0": put(frame, 7, "B", 0),
        "r06_flags_3": put(frame, 7, "B", 3),
        "r07_n_elems": put(frame, 8, "<Q", 2**40 + 1),
        "r07_n_elems_2_64": put(frame, 8, "<Q", 2**64 - 1),
        "r08_nnz": put(frame, 16, "<Q", 301),
        "r09_frame_bytes_odd": put(frame, 24, "<Q", 52),
        "r09_frame_bytes_small": put(frame, 24, "<Q", 32),
        "r09_frame_bytes_2_63": put(frame, 24, "<Q", 2**63),
        "r09_table_of_2_40": put(frame, 8, "<Q", 2**40),
        "r10_cut_off": frame[:-1],
        "r10_header_alone": frame[:32],
        "r11_count": put(put(frame, 16, "<Q", 200), 32, "<I", 301 | 1 << 20),
        "r11_count_of_last_slice": put(two, 40, "<I", 2),
        "r12_code_5": put(frame, 32, "<I", 5 | 5 << 20),
        "r12_code_as_wide_as_an_element": put(frame, 32, "<I", 5 | 4 << 20),
        "r12_code_without_changes": put(delta_ref.encode("int32", bytes(40), bytes(40)), 32, "<I", 1 << 20),
        "r13_bit_17": put(frame, 32, "<I", 5 | 1 << 20 | 1 << 17),
        "r13_bit_31": put(frame, 32, "<I", 5 | 1 << 20 | 1 << 31),
        "r14_count_below_nnz": put(frame, 16, "<Q", 6),
        "r14_count_above_nnz": put(frame, 16, "<Q", 4),
        "r15_first_slice_late": put(frame, 36, "<I", 11),
        "r15_first_slice_in_the_header": put(frame, 36, "<I", 0),
        "r15_second_slice_early": put(two, 44, "<I", 13),
        "r15_second_slice_late": put(two, 44, "<I", 2**32 - 1),
        "r15_escapes": put(frame, 48, "<I", 0x3FF),
        "r15_bytes_after_the_last_slice": put(frame, 24, "<Q", 64) + bytes(8),
        "r16_padding_at_the_end": put(raw, 63, "B", 1),
        "r17_bit_too_few": put(frame, 44, "<I", 0x2848),
        "r17_bit_too_many": put(frame, 44, "<I", 0x284B),
        "r17_bitmap_bit_too_few": put(ten, 40, "<I", 0x1FE),
        "r18_place_twice": put(frame, 44, "<I", 0x2843),
        "r19_place_past_the_end": put(frame, 40, "<I", 0xB10843 | 1 << 24),
        "r20_bitmap_bit_past_the_end": put(ten, 40, "<I", 0x5FE),
        "r20_padding_of_low": put(frame, 43, "B", 0x80),
        "r20_padding_of_high": put(frame, 44, "<I", 0x8849),
        "r20_padding_of_codes": put(frame, 48, "<I", 0x4E4),
        "r20_padding_of_values": put(raw, 58, "B", 1),
    }


def can_add(frames: list[ref.Frame]) -> bool:
    """True if frame_ref can add: it adds only finite floats. The pattern is finite, except in float16."""
    return frames[0].dtype not in ("float8", "float16") and not any(
        value[-1] & 0x7F == 0x7F
        for f in frames
        for value in f.listed.values()
        if f.dtype.startswith(("float", "bf"))
    )


def wanted() -> dict[str, dict[str, bytes]]:
    """All golden data: file in this folder -> name -> bytes."""
    records = {}
    for name, encoded in sorted(good().items()):
        records[name] = encoded
        frames = ref.read_array(encoded)
        dtype = frames[0].dtype
        dst = pattern(sum(f.n_elems for f in frames) * ref.DTYPES[ref.DTYPE_NUMBERS[dtype]][1])
        for verb in ref.VERBS:
            if (verb == "set" and any(f.is_delta for f in frames)) or (verb == "add" and not can_add(frames)):
                continue
            records[f"{name}.{verb}"] = ref.decode(encoded, verb, dst, dtype)
    deltas = {}
    for name, (dtype, base, x, code) in sorted(delta_good().items()):
        deltas |= {name: delta_ref.encode(dtype, x, base, code), f"{name}.base": base, f"{name}.x": x}
    return {
        "good.hex": records,
        "bad.hex": dict(sorted(bad().items())),
        "delta_good.hex": deltas,
        "delta_bad.hex": dict(sorted(delta_bad().items())),
    }


def read(path: Path) -> dict[str, bytes]:
    return {name: bytes.fromhex(data) for name, data in (line.split(" ") for line in path.read_text().splitlines())}


def main() -> None:
    for file, records in wanted().items():
        (HERE / file).write_text("".join(f"{name} {data.hex()}\n" for name, data in records.items()))


if __name__ == "__main__":
    main()
