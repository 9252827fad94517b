// columns.cuh - pici frames in the codec. A frame's values lie column by column, a slice row by row: between
// the two a lane has whole columns of the slice in registers, all rows of them, so that bits, places and
// values of a column are its own affair. The warps of a team have different tiles, or columns of one tile.
// The buffer that held the slice then holds the values, or the other way round.
#ifndef SP_COLUMNS_CUH
#define SP_COLUMNS_CUH

#include "kernels/cuda/codec.cuh"

// Tiles of a slice, or parts of one, at most.
#define SP_COLUMN_TOTALS 4u

// What a warp has of a slice. A lane's sequences, in the order in which their values follow each other in the
// frame: first come all columns of a tile, one lane behind the other.
template <class G> struct sp_columns {
    typedef typename G::U U;
    static constexpr uint32_t ROWS = G::TILE_ROWS;
    static constexpr uint32_t SHARED_BY = SP_CODEC_WARPS > G::TILES ? SP_CODEC_WARPS / G::TILES : 1; // a tile
    static constexpr uint32_t N_TILES =
        SP_CODEC_WARPS > G::TILES ? 1 : G::TILES / SP_CODEC_WARPS; // of a warp
    static constexpr uint32_t EACH = 2 / SHARED_BY;                // columns of a tile that a lane has
    static constexpr uint32_t SEQS = N_TILES * EACH;               // the lane's columns
    typedef typename sp_unsigned<(int)(EACH *G::E)>::type CELL;    // what it has of a row of a tile
    typedef typename sp_unsigned<(G::E == 8 ? 8 : 4)>::type ROW;   // and of a row of all its tiles
    static_assert(SHARED_BY <= 2 && SEQS * G::E <= sizeof(ROW), "a register for each row");
    static_assert(G::TILES * SHARED_BY <= SP_COLUMN_TOTALS, "one index unit, too");

    const sp_codec_cta &cta;
    uint32_t tile, column; // the warp's first tile, the lane's first column
    ROW row[ROWS];
    uint64_t bits[SEQS];      // of a column's elements, by row, those that are listed
    uint32_t before[N_TILES]; // values of the frame before the lane's first in that tile

    __device__ __forceinline__ explicit sp_columns(const sp_codec_cta &t)
        : cta(t), tile(t.warp / SHARED_BY * N_TILES), column(t.warp % SHARED_BY * 32 + t.lane * EACH)
    {
    }
    // Element of a row that belongs to a sequence.
    static __device__ __forceinline__ U element(ROW r, uint32_t seq)
    {
        return (U)(r >> seq * G::E * 8 % (sizeof(ROW) * 8));
    }
    // Where the lane's elements of a row lie in a slice.
    __device__ __forceinline__ uint32_t offset_of(uint32_t r, uint32_t t) const
    {
        return (tile + t) * 4096 + r * 64 + column;
    }
    __device__ __forceinline__ ROW row_of(const U *slice, uint32_t r) const
    {
        ROW all = 0;
#pragma unroll
        for (uint32_t t = 0; t < N_TILES; t++) {
            CELL cell = *(const CELL *)(slice + offset_of(r, t));
            all |= (ROW)cell << t * sizeof(CELL) * 8 % (sizeof(ROW) * 8);
        }
        return all;
    }
    // Rows and bits of a slice in shared memory, all tiles of it filled up with zeros. base: the same of the
    // base, or nullptr.
    __device__ __forceinline__ void read(const U *slice, const U *base)
    {
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            row[r] = row_of(slice, r);
#pragma unroll
        for (uint32_t q = 0; q < SEQS; q++)
            bits[q] = 0;
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            ROW differs = row[r] ^ (base != nullptr ? row_of(base, r) : 0);
#pragma unroll
            for (uint32_t q = 0; q < SEQS; q++)
                bits[q] |= element(differs, q) != 0 ? (uint64_t)1 << r : 0;
        }
    }
    // From the bits of all: what lies before. totals [SP_COLUMN_TOTALS] on chip become those of the tiles, or
    // of the parts of one. Has a cta.sync in it: after `count` the buffers that held the slice may be
    // written, totals only after another one.
    __device__ __forceinline__ void count(uint32_t *totals)
    {
        uint32_t sum = 0;
#pragma unroll
        for (uint32_t t = 0; t < N_TILES; t++) {
            uint32_t mine = 0, upto;
#pragma unroll
            for (uint32_t c = 0; c < EACH; c++)
                mine += (uint32_t)__popcll(bits[t * EACH + c]);
            upto = sp_warp_sum(mine, cta.lane);
            before[t] = upto - mine;
            if (cta.lane == 31)
                totals[cta.warp * N_TILES + t] = upto;
        }
        cta.sync();
#pragma unroll
        for (uint32_t i = 0; i < G::TILES * SHARED_BY; i++) {
#pragma unroll
            for (uint32_t t = 0; t < N_TILES; t++)
                before[t] += i == cta.warp * N_TILES + t ? sum : 0;
            sum += totals[i];
        }
    }
    // The values to their places among those of the frame.
    __device__ __forceinline__ void pack(U *values)
    {
#pragma unroll
        for (uint32_t q = 0; q < SEQS; q++) // else the compiler looks at the rows again, and keeps it all
            sp_opaque(bits[q]);
#pragma unroll
        for (uint32_t t = 0; t < N_TILES; t++) {
            U *to = values + before[t];
#pragma unroll
            for (uint32_t c = 0; c < EACH; c++)
#pragma unroll
                for (uint32_t r = 0; r < ROWS; r++)
                    if (bits[t * EACH + c] >> r & 1)
                        *to++ = element(row[r], t * EACH + c);
        }
    }
    // Back: rows, from the values of the frame, zeros where nothing is listed.
    __device__ __forceinline__ void unpack(const U *values)
    {
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            row[r] = 0;
#pragma unroll
        for (uint32_t t = 0; t < N_TILES; t++) {
            const U *from = values + before[t];
#pragma unroll
            for (uint32_t c = 0; c < EACH; c++)
#pragma unroll
                for (uint32_t r = 0; r < ROWS; r++)
                    if (bits[t * EACH + c] >> r & 1)
                        row[r] |= (ROW)*from++ << (t * EACH + c) * G::E * 8 % (sizeof(ROW) * 8);
        }
    }
    __device__ __forceinline__ void write(U *slice) const
    {
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
#pragma unroll
            for (uint32_t t = 0; t < N_TILES; t++)
                *(CELL *)(slice + offset_of(r, t)) =
                    (CELL)(row[r] >> t * sizeof(CELL) * 8 % (sizeof(ROW) * 8));
    }
};

#endif
