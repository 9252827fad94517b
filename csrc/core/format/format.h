/* format.h - the parts of a frame, section by section as in docs/FORMAT.md. Core, kernels and bindings
 * use it. */
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
 * 16  8  nnz     number of listed elements (dense: n_elems)
 * 24  8  frame_bytes, header and padding included, a multiple of 16
 * 32  8  index_off    0 = no such section
 * 40  8  meta_off
 * 48  8  values_off
 * 56  8  reserved, zero
 * Sections start at multiples of 16 bytes from the frame's start, in the order index, meta, values. There is
 * no more padding than that needs, and padding bytes are zero. */
#define SP_FRAME_MAGIC 0x46435053u /* "SPCF" read as little-endian u32 */
#define SP_FRAME_VERSION 1u
#define SP_FRAME_HEADER_BYTES 64u
#define SP_FRAME_ALIGN 16u
#define SP_FRAME_ELEMS_MAX ((uint64_t)SPCCL_SLICE_ELEMS_MAX) /* keeps every index and prefix in 32 bits */
#define SP_FRAME_FLAG_DELTA 1u

/* ---- FORMAT.md 3.1 empty: no sections, nnz 0 (n_elems may be 0 in this format only) ---- */

/* ---- FORMAT.md 3.2 tile: blocks of 256 elements ----
 * Index section: [ceil(n/256)] u8, number of listed elements of each block.
 * Meta section: [nnz] u8, offset of each listed element in its block, strictly rising inside a block.
 * Values: [nnz]. A slice with all 256 elements of a block listed cannot take this format. */
#define SP_TILE_ELEMS 256u

/* ---- FORMAT.md 3.3 pici (Hough et al., section III.B): virtual 64x64 tiles, row-major ----
 * Index section: [n_tiles] u32, exclusive prefix sum of the numbers of listed elements per tile.
 * Meta section: [n_tiles*64] u64 bit words. Bit r of word c of a tile is element r*64+c of the tile. Bits of
 * elements from n_elems on are zero.
 * Values: [nnz], in the order of the bits: by tile, then column, then row. */
#define SP_PICI_TILE_ELEMS 4096u
#define SP_PICI_TILE_WORDS 64u

/* ---- FORMAT.md 3.4 coo ----
 * Index section: [nnz] u32, index of each listed element in the slice, strictly rising. Values: [nnz]. */

/* ---- FORMAT.md 3.5 dense ----
 * Values: [n_elems]. nnz is n_elems, although a value with all bits zero is an absent element. */

/* Offsets of a frame's sections. They follow from its format and counts. */
typedef struct sp_frame_layout {
    size_t index_off, meta_off, values_off; /* 0 = no such section */
    size_t frame_bytes;
} sp_frame_layout;

/* Layout of a frame. n_elems <= SP_FRAME_ELEMS_MAX, nnz <= n_elems, elem_bytes is 1, 2, 4 or 8. With these
 * limits a 64-bit size_t cannot overflow. Dense ignores nnz. */
void sp_frame_layout_of(spccl_format format, size_t n_elems, size_t nnz, size_t elem_bytes,
                        sp_frame_layout *out);
/* Exact size of a frame in bytes, under the conditions of sp_frame_layout_of. */
size_t sp_frame_bytes(spccl_format format, size_t n_elems, size_t nnz, size_t elem_bytes);
/* Size of the largest frame of n_elems. sp_frame_bound: if the format is chosen by size, the dense frame.
 * sp_frame_bound_forced: if the format is forced. */
size_t sp_frame_bound(size_t n_elems, size_t elem_bytes);
size_t sp_frame_bound_forced(spccl_format format, size_t n_elems, size_t elem_bytes);

/* Write the header and the zeros of the padding. dst has layout->frame_bytes bytes. */
void sp_frame_write_header(void *dst, spccl_format format, spccl_dtype dtype, bool is_delta, size_t n_elems,
                           size_t nnz, const sp_frame_layout *layout);

/* A frame that sp_frame_validate accepted. The pointers point into the frame's bytes. */
typedef struct sp_frame {
    spccl_format format;
    spccl_dtype dtype;
    bool is_delta;
    size_t n_elems, nnz, frame_bytes;
    const uint8_t *index, *meta, *values; /* NULL = no such section */
} sp_frame;

/* Check all rules of docs/FORMAT.md section 4: header, sizes, offsets, and the index and meta sections. In an
 * accepted frame no element is listed twice, and no kernel reads or writes out of bounds. `bytes` may be
 * larger than the frame. The function does not read past `bytes`.
 * Errors: FORMAT, VERSION; the text names the field, what it holds and what was wanted. */
spccl_status sp_frame_validate(const void *buf, size_t bytes, sp_frame *out);

/* Check the header only: for listing frames. Errors: as for sp_frame_validate. */
spccl_status sp_frame_validate_header(const void *buf, size_t bytes, sp_frame *out);

#endif
