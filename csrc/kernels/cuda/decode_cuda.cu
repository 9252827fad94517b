// decode_cuda.cu - applies an encoded array to an array in GPU memory, with one CTA per frame.
//
// The table of offsets that encode wrote says where each frame starts. A frame is checked before any of it is
// applied. Least traffic: reads the encoded array, writes n * e bytes (ADD and OVERWRITE: the listed
// elements).
#include "kernels/cuda/columns.cuh"

// Bytes of the next frame that are fetched while this one is decoded. A longer frame is read from global
// memory.
#define SP_FETCH_BYTES 2560u

struct __align__(16) sp_decode_smem
{
    uint8_t buf[SP_GPU_SLICE_BYTES];
    uint8_t frame[2][SP_FETCH_BYTES];
    uint32_t totals[SP_COLUMN_TOTALS]; // of sp_columns
};

__device__ __forceinline__ spccl_status sp_status_of(const sp_wrong &wrong)
{
    return wrong.rule == 3 ? SPCCL_ERR_VERSION : wrong.rule >= 29 ? SPCCL_ERR_FRAME : SPCCL_ERR_FORMAT;
}

// ADD and OVERWRITE: a listed element becomes APPLY(old, value).
template <class G, class APPLY> struct sp_sink_apply {
    typename G::U *dst;
    APPLY apply;
    __device__ __forceinline__ void put(uint32_t i, typename G::U x) const
    {
        dst[i] = apply(dst[i], x);
    }
    __device__ __forceinline__ void unit(uint32_t u, uint32_t bits, const sp_unit<G> &x) const
    {
#pragma unroll
        for (uint32_t c = 0; c < G::K; c++)
            if (bits >> c & 1)
                put(u * G::K + c, x.e[c]);
    }
};

// Discards the elements: the frame is only checked.
template <class G> struct sp_sink_none {
    __device__ __forceinline__ void put(uint32_t, typename G::U) const
    {
    }
    __device__ __forceinline__ void unit(uint32_t, uint32_t, const sp_unit<G> &) const
    {
    }
};

// The status for a frame that sp_decoder::open refused. If sp_open accepts the frame, the table of offsets
// gives it too many bytes: FORMAT.
template <uint32_t E>
__device__ __noinline__ spccl_status sp_why_refused(const uint8_t *start, uint32_t bytes, uint32_t dtype,
                                                    uint32_t n)
{
    sp_view v;
    sp_wrong wrong;
    return sp_open<E>((const uint4 *)start, bytes, dtype, n, &v, &wrong) ? SPCCL_ERR_FORMAT
                                                                         : sp_status_of(wrong);
}

// One warp of a CTA. A listed element becomes APPLY(old, value). With SET all elements are written, and those
// that are not listed become zero.
template <int BYTES, bool SET, class APPLY> struct sp_decoder {
    typedef sp_codec_geometry<BYTES> T;
    typedef typename T::U U;
    typedef typename T::G G;
    typedef typename T::P P;
    const sp_gpu_decode_args &a;
    sp_decode_smem &smem;
    sp_codec_cta cta;
    uint64_t n_slices;
    APPLY apply;

    __device__ __forceinline__ sp_decoder(const sp_gpu_decode_args &args, sp_decode_smem &shared, APPLY f)
        : a(args), smem(shared), n_slices((args.n_elems + args.slice_elems - 1) / args.slice_elems), apply(f)
    {
    }
    // Where frame s lies in the encoded array.
    struct span {
        uint64_t from, to;
    };
    __device__ __forceinline__ span find(uint64_t s) const
    {
        if (s >= n_slices)
            return {0, 0};
        return {a.offsets[s], a.offsets[s + 1]};
    }
    // Start to copy the first bytes of a frame into shared memory. An impossible position becomes {0, 0}: the
    // frame is then refused as cut off.
    __device__ __forceinline__ void fetch(span &at, uint8_t *frame) const
    {
        if (at.from % 16 != 0 || at.to > a.encoded_bytes || at.from > at.to || at.to - at.from > 1u << 30)
            at = {0, 0};
        for (uint32_t i = threadIdx.x * 16; i < SP_FETCH_BYTES && i + 16 <= at.to - at.from;
             i += SP_CODEC_THREADS * 16)
            sp_copy16_async(frame + i, a.encoded + at.from + i);
        sp_copy_commit();
    }
    // Check the header of a frame that must have n elements and exactly `bytes` bytes, and describe it in *v.
    __device__ __forceinline__ bool open(const uint4 *header, uint32_t bytes, uint32_t n, sp_view *v) const
    {
        v->format = header[0].y >> 8 & 0xff;
        v->is_delta = header[0].y >> 24 & SP_FRAME_FLAG_DELTA;
        v->n = n;
        v->nnz = header[1].x;
        v->at = sp_layout_cuda<G::E>(v->format, n, v->nnz);
        return bytes >= SP_FRAME_HEADER_BYTES && sp_header_fits(v->format, n, v->nnz) &&
               (v->is_delta == 0 || v->format != SPCCL_FORMAT_DENSE) && v->at.bytes == bytes &&
               sp_header_is(header, v->format, a.dtype, v->is_delta != 0, n, v->nnz, v->at);
    }
    // Read the bits of this warp's columns of a pici frame and check rules 23 to 25 on them (*good). Copies
    // the values of the frame into the buffer as well; afterwards all warps see them. False, in all warps:
    // the number of bits is not nnz.
    __device__ __forceinline__ bool read_words(const sp_view &v, const uint8_t *whole, sp_columns<G> &mine,
                                               bool *good) const
    {
        typedef sp_columns<G> C;
        const uint32_t *prefixes = (const uint32_t *)(v.p + v.at.index);
        const uint64_t *words = (const uint64_t *)(v.p + v.at.meta);
        uint32_t n_tiles = (v.n + 4095) / 4096, sum = 0;
        for (uint32_t i = threadIdx.x * 16; i < v.at.bytes - v.at.values; i += SP_CODEC_THREADS * 16)
            sp_copy16_async(smem.buf + i, whole + v.at.values + i);
        sp_copy_commit();
#pragma unroll
        for (uint32_t q = 0; q < C::SEQS; q++) {
            uint32_t t = mine.tile + q / C::EACH, column = mine.column + q % C::EACH;
            uint32_t have = v.n > t * 4096 + column ? v.n - t * 4096 - column : 0, rows = (have + 63) / 64;
            mine.bits[q] = t < n_tiles ? words[t * 64 + column] : 0;
            *good &= rows >= 64 || mine.bits[q] >> rows == 0;
        }
        sp_copy_wait<0>();
        mine.count(smem.totals);
#pragma unroll
        for (uint32_t i = 0; i < G::PICI_TILES * C::SHARED_BY; i++) {
            if (i % C::SHARED_BY == 0 && i / C::SHARED_BY < n_tiles)
                *good &= prefixes[i / C::SHARED_BY] == sum;
            sum += smem.totals[i];
        }
        return sum == v.nnz;
    }
    // Apply a pici frame. Before the call all warps must be done with the buffer. False, in all warps: the
    // frame breaks a rule, and dst is unchanged. whole: the frame in global memory. good: the result of this
    // lane's earlier checks.
    __device__ __forceinline__ bool columns(const sp_view &v, const uint8_t *whole, U *dst, bool good) const
    {
        typedef sp_columns<G> C;
        U *buf = (U *)smem.buf;
        C mine(cta);
        if (!read_words(v, whole, mine, &good)) // then no value's element is known
            return false;
        mine.unpack(buf);
        if (!cta.all(good))
            return false;
        if constexpr (SET) {
            mine.write(buf);
            sp_slice_written();
            cta.sync();
            store(v.n, dst);
        } else {
#pragma unroll
            for (uint32_t r = 0; r < C::ROWS; r++)
#pragma unroll
                for (uint32_t q = 0; q < C::SEQS; q++)
                    if (mine.bits[q] >> r & 1) {
                        U *at = dst + mine.offset_of(r, q / C::EACH) + q % C::EACH;
                        *at = apply(*at, C::element(mine.row[r], q));
                    }
        }
        return true;
    }
    // Write this warp's part of the buffer to its part of dst [n].
    __device__ __forceinline__ void store(uint32_t n, U *dst) const
    {
        uint32_t from = cta.warp * P::MAX_ELEMS;
        sp_slice_store<P>(cta.lane, (U *)smem.buf + from, dst + from, T::elems(n, cta.warp));
    }
    template <class SINK> __device__ __forceinline__ bool decode(const sp_view &v, SINK &sink) const
    {
        if (v.format == SPCCL_FORMAT_TILE)
            return sp_decode_tile<G, SP_CODEC_WARPS>(cta.lane, v, v.p, sink, cta.warp);
        if (v.format == SPCCL_FORMAT_COO)
            return sp_decode_coo<G, SP_CODEC_WARPS>(cta.lane, v, v.p, sink, cta.warp);
        if (v.format == SPCCL_FORMAT_DENSE)
            sp_decode_dense<G, SP_CODEC_WARPS>(cta.lane, v, sink, cta.warp);
        return true;
    }
    // Apply a frame that is not pici, with SET. Otherwise as `columns`.
    __device__ __forceinline__ bool set(const sp_view &v, U *dst, bool good) const
    {
        uint32_t from = cta.warp * P::MAX_ELEMS;
        U *buf = (U *)smem.buf;
        sp_sink_smem<G> sink = {buf};
        if (v.format == SPCCL_FORMAT_EMPTY) { // there is nothing to check
            sp_slice_store_zero<P>(cta.lane, dst + from, T::elems(v.n, cta.warp));
            return true;
        }
        if (sp_is_listed(v.format)) { // coo entries may lie in any part, tile entries lie in this warp's part
            sp_zero_units(cta.lane, buf + from, P::UNITS);
            if (v.format == SPCCL_FORMAT_COO)
                cta.sync();
            else
                __syncwarp();
        }
        good &= decode(v, sink);
        sp_slice_written();
        if (!cta.all(good))
            return false;
        store(v.n, dst);
        return true;
    }
    // Apply one frame of `bytes` bytes to dst [n]. start: its first bytes in shared memory; whole: all of it
    // in global memory.
    __device__ __forceinline__ spccl_status frame(const uint8_t *start, const uint8_t *whole, uint32_t bytes,
                                                  U *dst, uint32_t n) const
    {
        sp_sink_none<G> none;
        sp_sink_apply<G, APPLY> sink = {dst, apply};
        sp_view v;
        bool ok;
        if (!open((const uint4 *)start, bytes, n, &v))
            return sp_why_refused<G::E>(start, bytes, a.dtype, n);
        if (SET && v.is_delta != 0)
            return SPCCL_ERR_FRAME;
        v.p = bytes <= SP_FETCH_BYTES ? start : whole;
        v.values = v.p + v.at.values;
        ok = sp_padding_is_zero<G::E>(cta.lane, v);
        if (v.format == SPCCL_FORMAT_PICI)
            return columns(v, whole, dst, ok) ? SPCCL_OK : SPCCL_ERR_FORMAT;
        if (SET)
            return set(v, dst, ok) ? SPCCL_OK : SPCCL_ERR_FORMAT;
        if (!cta.all(decode(v, none) && ok))
            return SPCCL_ERR_FORMAT;
        decode(v, sink);
        return SPCCL_OK;
    }
    // All frames: CTA q of n has frames q, q + n ... The offsets of a frame are read two frames ahead, and
    // its first bytes are fetched one frame ahead.
    __device__ __forceinline__ void run() const
    {
        uint32_t parity = 0;
        span now = find(blockIdx.x), next = find((uint64_t)blockIdx.x + gridDim.x);
        fetch(now, smem.frame[0]);
        for (uint64_t s = blockIdx.x; s < n_slices; s += gridDim.x, parity ^= 1) {
            uint64_t from = s * a.slice_elems;
            const uint8_t *whole = a.encoded + now.from;
            uint32_t bytes = (uint32_t)(now.to - now.from);
            sp_copy_wait<0>();
            sp_slice_stored(cta.lane);
            cta.sync(); // the frame's first bytes are there, and no warp uses the buffer any more
            fetch(next, smem.frame[parity ^ 1]);
            now = next;
            next = find(s + 2 * (uint64_t)gridDim.x);
            spccl_status st = frame(smem.frame[parity], whole, bytes, (U *)a.dst + from,
                                    (uint32_t)min(a.n_elems - from, (uint64_t)a.slice_elems));
            if (st != SPCCL_OK && cta.is_first())
                sp_set_status(a.status, st);
        }
        sp_copy_wait<0>();
        sp_slice_stored(cta.lane);
    }
};

template <int BYTES, bool SET, class APPLY>
__device__ __forceinline__ void sp_decode_all(const sp_gpu_decode_args &a, APPLY apply)
{
    sp_decoder<BYTES, SET, APPLY>(a, *(sp_decode_smem *)sp_block_shared(), apply).run();
}

// One CTA decodes a frame, then the frame that is gridDim.x further on. 10 CTAs fit in the shared
// memory of an SM (sm_90).
template <int BYTES>
__global__ void __launch_bounds__(SP_CODEC_THREADS, 10)
    sp_set_kernel(const __grid_constant__ sp_gpu_decode_args a)
{
    typedef typename sp_unsigned<BYTES>::type U;
    sp_decode_all<BYTES, true>(a, [](U, U x) { return x; });
}
template <int BYTES>
__global__ void __launch_bounds__(SP_CODEC_THREADS, 8)
    sp_overwrite_kernel(const __grid_constant__ sp_gpu_decode_args a)
{
    typedef typename sp_unsigned<BYTES>::type U;
    sp_decode_all<BYTES, false>(a, [](U, U x) { return x; });
}
template <int DTYPE>
__global__ void __launch_bounds__(SP_CODEC_THREADS, 8)
    sp_add_kernel(const __grid_constant__ sp_gpu_decode_args a)
{
    typedef sp_elem<DTYPE> E;
    typedef typename E::U U;
    sp_decode_all<sizeof(U), false>(a, [](U d, U x) { return E::narrow(E::add(E::widen(d), E::widen(x))); });
}

// ---- launching ----

typedef void (*sp_decode_fn)(const sp_gpu_decode_args);

extern "C" spccl_status sp_decode_cuda(const sp_gpu_decode_args *a, void *stream)
{
    static const sp_decode_fn set[] = {sp_set_kernel<1>, sp_set_kernel<2>, sp_set_kernel<4>,
                                       sp_set_kernel<8>};
    static const sp_decode_fn overwrite[] = {sp_overwrite_kernel<1>, sp_overwrite_kernel<2>,
                                             sp_overwrite_kernel<4>, sp_overwrite_kernel<8>};
    // By spccl_dtype. Integer sums wrap, so int8 and uint8 give the same bits; float8 has no sums.
    static const sp_decode_fn add[] = {nullptr,
                                       sp_add_kernel<SPCCL_FLOAT32>,
                                       sp_add_kernel<SPCCL_FLOAT16>,
                                       sp_add_kernel<SPCCL_BFLOAT16>,
                                       sp_add_kernel<SPCCL_FLOAT64>,
                                       nullptr,
                                       sp_add_kernel<SPCCL_UINT8>,
                                       sp_add_kernel<SPCCL_INT16>,
                                       sp_add_kernel<SPCCL_INT32>,
                                       sp_add_kernel<SPCCL_INT64>,
                                       sp_add_kernel<SPCCL_UINT8>};
    sp_decode_fn kernel = a->verb == SPCCL_SET         ? set[sp_width_index(a->dtype)]
                          : a->verb == SPCCL_OVERWRITE ? overwrite[sp_width_index(a->dtype)]
                                                       : add[a->dtype];
    uint32_t grid = 0;
    if (kernel == nullptr)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "decode: float8 is carried as bytes and cannot be added: use SET or OVERWRITE");
    SP_TRY(sp_codec_grid((const void *)kernel, sizeof(sp_decode_smem),
                         (a->n_elems + a->slice_elems - 1) / a->slice_elems, &grid));
    SP_TRY_CUDA(cudaMemsetAsync(a->status, 0, sizeof *a->status, (cudaStream_t)stream));
    return sp_launch(kernel, {grid, SP_CODEC_THREADS, sizeof(sp_decode_smem)}, a, stream,
                     "launch of the decode kernel");
}
