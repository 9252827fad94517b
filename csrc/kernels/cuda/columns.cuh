// columns.cuh - pici frames in the codec. The values of a frame are ordered by column, the elements of a
// slice by row. To convert between the two orders, each lane holds whole columns of the slice in registers,
// with all their rows. A lane thus finds bits, offsets and values of its columns without other lanes. The
// warps of a CTA have different tiles, or different columns of one tile. The buffer that held the slice then
// holds the values, and in decoding the reverse.
#ifndef SP_COLUMNS_CUH
#define SP_COLUMNS_CUH

#include "kernels/cuda/codec.cuh"

// The most tiles of a slice; if warps share a tile: the most parts of tiles.
#define SP_COLUMN_TOTALS 4u

// A warp's part of a slice. A lane has SEQS columns. In the frame their values follow each other in this
// order: tile by tile; in a tile lane by lane; then column by column.
template <class G> struct sp_columns {
    typedef typename G::U U;
    static constexpr uint32_t ROWS = G::TILE_ROWS;
    // Warps per tile.
    static constexpr uint32_t SHARED_BY = SP_CODEC_WARPS > G::PICI_TILES ? SP_CODEC_WARPS / G::PICI_TILES : 1;
    static constexpr uint32_t N_PICI_TILES =
        SP_CODEC_WARPS > G::PICI_TILES ? 1 : G::PICI_TILES / SP_CODEC_WARPS; // per warp
    static constexpr uint32_t EACH = 2 / SHARED_BY;                          // columns per lane and tile
    static constexpr uint32_t SEQS = N_PICI_TILES * EACH;                    // columns per lane
    typedef typename sp_unsigned<(int)(EACH *G::E)>::type CELL; // a lane's elements of one row of a tile
    // A lane's elements of one row of all its tiles.
    typedef typename sp_unsigned<(G::E == 8 ? 8 : 4)>::type ROW;
    static_assert(SHARED_BY <= 2 && SEQS * G::E <= sizeof(ROW), "each row fits into a register");
    static_assert(G::PICI_TILES * SHARED_BY <= SP_COLUMN_TOTALS, "the index section is one unit");

    const sp_codec_cta &cta;
    uint32_t tile, column; // the warp's first tile; the lane's first column
    ROW row[ROWS];
    uint64_t bits[SEQS];           // per column: a bit for each row whose element is listed
    uint32_t before[N_PICI_TILES]; // per tile: values in the frame before the lane's first value

    __device__ __forceinline__ explicit sp_columns(const sp_codec_cta &t)
        : cta(t), tile(t.warp / SHARED_BY * N_PICI_TILES), column(t.warp % SHARED_BY * 32 + t.lane * EACH)
    {
    }
    // Element of column `seq` in a row.
    static __device__ __forceinline__ U element(ROW r, uint32_t seq)
    {
        return (U)(r >> seq * G::E * 8 % (sizeof(ROW) * 8));
    }
    // Index in the slice of the lane's first element of row r of its tile t.
    __device__ __forceinline__ uint32_t offset_of(uint32_t r, uint32_t t) const
    {
        return (tile + t) * 4096 + r * 64 + column;
    }
    __device__ __forceinline__ ROW row_of(const U *slice, uint32_t r) const
    {
        ROW all = 0;
#pragma unroll
        for (uint32_t t = 0; t < N_PICI_TILES; t++) {
            CELL cell = *(const CELL *)(slice + offset_of(r, t));
            all |= (ROW)cell << t * sizeof(CELL) * 8 % (sizeof(ROW) * 8);
        }
        return all;
    }
    // Read rows and bits of a slice in shared memory. Its tiles must be filled up with zeros. base: the base
    // in shared memory, filled up likewise, or nullptr.
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
    // From the bits of all lanes find `before`. totals [SP_COLUMN_TOTALS], in shared memory, gets the number
    // of values of each tile, or of each part of a tile. Calls cta.sync once: after `count` the buffer that
    // held the slice may be written; totals may be written after another cta.sync.
    __device__ __forceinline__ void count(uint32_t *totals)
    {
        uint32_t sum = 0;
#pragma unroll
        for (uint32_t t = 0; t < N_PICI_TILES; t++) {
            uint32_t mine = 0, upto;
#pragma unroll
            for (uint32_t c = 0; c < EACH; c++)
                mine += (uint32_t)__popcll(bits[t * EACH + c]);
            upto = sp_warp_sum(mine, cta.lane);
            before[t] = upto - mine;
            if (cta.lane == 31)
                totals[cta.warp * N_PICI_TILES + t] = upto;
        }
        cta.sync();
#pragma unroll
        for (uint32_t i = 0; i < G::PICI_TILES * SHARED_BY; i++) {
#pragma unroll
            for (uint32_t t = 0; t < N_PICI_TILES; t++)
                before[t] += i == cta.warp * N_PICI_TILES + t ? sum : 0;
            sum += totals[i];
        }
    }
    // Write this lane's values to `values`, in the order of the frame.
    __device__ __forceinline__ void pack(U *values)
    {
        // Otherwise the compiler derives the bits from the rows again and keeps all rows in registers.
#pragma unroll
        for (uint32_t q = 0; q < SEQS; q++)
            sp_opaque(bits[q]);
#pragma unroll
        for (uint32_t t = 0; t < N_PICI_TILES; t++) {
            U *to = values + before[t];
#pragma unroll
            for (uint32_t c = 0; c < EACH; c++)
#pragma unroll
                for (uint32_t r = 0; r < ROWS; r++)
                    if (bits[t * EACH + c] >> r & 1)
                        *to++ = element(row[r], t * EACH + c);
        }
    }
    // Rebuild the rows from the values of a frame, with zeros where nothing is listed.
    __device__ __forceinline__ void unpack(const U *values)
    {
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            row[r] = 0;
#pragma unroll
        for (uint32_t t = 0; t < N_PICI_TILES; t++) {
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
            for (uint32_t t = 0; t < N_PICI_TILES; t++)
                *(CELL *)(slice + offset_of(r, t)) =
                    (CELL)(row[r] >> t * sizeof(CELL) * 8 % (sizeof(ROW) * 8));
    }
};

#endif
