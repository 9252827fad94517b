/* format.h - what a frame is made of: the C face of docs/FORMAT.md, section by section.
 * A contract between core, kernels and bindings. Knows no ranks, no schedules, no transports. */
#ifndef SP_FORMAT_H
#define SP_FORMAT_H

#include "core/base/bits.h"
#include "spccl.h"

#include <stdbool.h>

/* ---- FORMAT.md 2: the header, 64 bytes, little-endian ----
 *  0  4  magic "SPCF"
 *  4  1  version = 1
 *  5  1  format  (spccl_format 0..4)
 *  6  1  dtype   (spccl_dtype)
 *  7  1  flags   bit 0: delta (encoded against a base); other bits zero
 *  8  8  n_elems (1 .. 2^31, or 0)
 * 16  8  nnz     elements listed (dense: n_elems)
 * 24  8  frame_bytes, header and padding included, a multiple of 16
 * 32  8  index_off    0 = no such section
 * 40  8  meta_off
 * 48  8  values_off
 * 56  8  reserved, zero
 * Sections start at multiples of 16 from the frame's start, in the order index, meta, values, with
 * no more padding than that needs; padding bytes are zero. */
#define SP_FRAME_MAGIC 0x46435053u /* "SPCF" read as little-endian u32 */
#define SP_FRAME_VERSION 1u
#define SP_FRAME_HEADER_BYTES 64u
#define SP_FRAME_ALIGN 16u
#define SP_FRAME_ELEMS_MAX ((uint64_t)1 << 31) /* keeps every index and prefix in 32 bits */
#define SP_FRAME_FLAG_DELTA 1u

/* ---- FORMAT.md 3.1 empty: no sections, nnz 0 (n_elems may be 0 in this format only) ---- */

/* ---- FORMAT.md 3.2 tile: per block of 256 elements a u8 count of its listed elements (index
 * section, [ceil(n/256)]), then one u8 place in its block for each (meta section, [nnz], strictly rising
 * inside a block), then the values ([nnz]). A block with 256 listed elements does not fit. ---- */
#define SP_TILE_ELEMS 256u

/* ---- FORMAT.md 3.3 pici (Hough et al., section III.B): virtual 64x64 tiles, row-major; bit r of word
 * c of a tile is element r*64+c of the tile. Index section: [n_tiles] u32, exclusive prefix sum of the
 * listed elements per tile. Meta section: [n_tiles*64] u64 bit words; bits beyond n_elems are zero.
 * Values in the order of the bits: by tile, then column, then row. ---- */
#define SP_PICI_TILE_ELEMS 4096u
#define SP_PICI_TILE_WORDS 64u

/* ---- FORMAT.md 3.4 coo: [nnz] u32 flat index, strictly rising (index section), [nnz] values ---- */
/* ---- FORMAT.md 3.5 dense: [n_elems] values; nnz == n_elems, and yet a value with all bits zero is an absent
 * element ---- */

/* Where the sections of a frame lie, from its format and counts alone. */
typedef struct sp_frame_layout {
    size_t index_off, meta_off, values_off; /* 0 = no such section */
    size_t frame_bytes;
} sp_frame_layout;

/* Layout of a frame.  n_elems <= SP_FRAME_ELEMS_MAX, nnz <= n_elems, elem_bytes in {1,2,4,8}. Cannot overflow
 * a 64-bit size_t. Dense ignores nnz. */
void sp_frame_layout_of(spccl_format format, size_t n_elems, size_t nnz, size_t elem_bytes,
                        sp_frame_layout *out);
/* Exact size of a frame in bytes; same conditions. */
size_t sp_frame_bytes(spccl_format format, size_t n_elems, size_t nnz, size_t elem_bytes);
/* Largest frame that a choice by size can produce for `n_elems` (that is the dense one), and the largest
 * that a forced format can produce. */
size_t sp_frame_bound(size_t n_elems, size_t elem_bytes);
size_t sp_frame_bound_forced(spccl_format format, size_t n_elems, size_t elem_bytes);

/* Write the 64 header bytes and zero the padding between sections. dst has layout->frame_bytes. */
void sp_frame_write_header(void *dst, spccl_format format, spccl_dtype dtype, bool is_delta, size_t n_elems,
                           size_t nnz, const sp_frame_layout *layout);

/* A frame that passed sp_frame_validate. Pointers borrow the frame's bytes. */
typedef struct sp_frame {
    spccl_format format;
    spccl_dtype dtype;
    bool is_delta;
    size_t n_elems, nnz, frame_bytes;
    const uint8_t *index, *meta, *values; /* NULL = no such section */
} sp_frame;

/* Check everything that docs/FORMAT.md section 4 says a reader must refuse: header, sizes, offsets, and the
 * index sections (counts, places, prefixes, bits, indices) so that no kernel can go out of bounds and
 * no element is listed twice.  `bytes` may be longer than the frame. Never reads past `bytes`.
 * Errors: FORMAT, VERSION; the text names the field, got and wanted. */
spccl_status sp_frame_validate(const void *buf, size_t bytes, sp_frame *out);

/* The header check alone (no index sections): for listing frames. Same errors. */
spccl_status sp_frame_validate_header(const void *buf, size_t bytes, sp_frame *out);

#endif
