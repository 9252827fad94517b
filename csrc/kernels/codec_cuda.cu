// codec_cuda.cu - arrays in GPU memory to streams of frames and back, one worker (256 threads) per block.
//
// Encode reads the array once: while one slice is loaded, the next one before it is encoded, and the one
// before that finds its place in the stream. Decode finds each frame by the table of offsets that encode
// wrote. Bytes moved, floor: encode reads n * e and writes the stream; decode reads the stream and writes n *
// e.
#include "cuda_check.h"
#include "decode.cuh"
#include "kernels_cuda.h"

// ---- encode ----

// Frames of at most so many bytes wait on chip for their place while the next slice is encoded: half of a
// dense one, so that four blocks fit on a multiprocessor.
#define SP_STAGE_BYTES 10496u

struct __align__(16) sp_encode_room
{
    uint8_t buf[2][SP_GPU_SLICE_BYTES]; // slices in turn; with a base: slice and base
    uint8_t stage[2][SP_STAGE_BYTES];
    uint8_t scratch[sizeof(sp_pici_scratch<sp_geometry<uint8_t, 4>>)];
    sp_encode_shared counts;
    uint64_t offset; // of a frame in the stream
};

// Where a slice's frame starts: the sum of all before it, found by looking back in two levels (after Merrill
// and Garland 2016, "Single-pass parallel prefix scan with decoupled look-back"), so that one load per lane
// sees 32 groups of 32 slices. All words start at 0; each is written by one atomic or one store that says by
// itself what it is.
struct sp_sums {
    uint64_t *own;   // [n_slices] 1 + bytes of the frame
    uint64_t *group; // [n_groups] bytes of the frames known so far, and how many, from bit 56 on
    uint64_t *all;   // [n_groups] 1 + bytes of this group and all before it

    __device__ __forceinline__ sp_sums(void *scratch, uint32_t n_slices)
    {
        own = (uint64_t *)scratch;
        group = own + n_slices;
        all = group + (n_slices + 31) / 32;
    }
    // Slice s has so many bytes. One thread.
    __device__ __forceinline__ void tell(uint32_t s, uint32_t bytes) const
    {
        sp_store_relaxed_gpu(own + s, 1 + (uint64_t)bytes);
        atomicAdd((unsigned long long *)group + s / 32, (1ull << 56) | bytes);
    }
    // What start_of will want to know first, asked for early.
    __device__ __forceinline__ uint64_t peek(uint32_t s, uint32_t lane) const
    {
        return lane < s % 32 ? sp_load_relaxed_gpu(own + (s & ~31u) + lane) : 1;
    }
    // Where slice s starts. One warp; waits for the slices before it, whose blocks run (cooperative launch).
    __device__ __forceinline__ uint64_t start_of(uint32_t s, uint32_t bytes, uint64_t v, uint32_t lane) const
    {
        uint32_t g = s / 32, in_group = s % 32;
        uint64_t sum = 0;
        while (__any_sync(~0u, v == 0))
            v = peek(s, lane);
        sum = v - 1;
        for (int64_t last = (int64_t)g - 1; last >= 0; last -= 32) {
            int64_t i = last - lane;
            uint64_t upto = i < 0 ? 1 : sp_load_relaxed_gpu(all + i), part;
            uint32_t done = __ballot_sync(~0u, upto != 0), nearest = done == 0 ? 32 : __ffs(done) - 1;
            do
                part = lane < nearest ? sp_load_relaxed_gpu(group + i) : 32ull << 56;
            while (__any_sync(~0u, part >> 56 != 32));
            sum += part & ((1ull << 56) - 1);
            if (lane == nearest)
                sum += upto - 1;
            if (done != 0)
                break;
        }
#pragma unroll
        for (uint32_t d = 16; d != 0; d >>= 1)
            sum += __shfl_xor_sync(~0u, sum, d);
        if (in_group == 31 && lane == 0)
            sp_store_relaxed_gpu(all + g, 1 + sum + bytes);
        return sum;
    }
};

__device__ __forceinline__ void sp_tell_status(uint32_t *status, spccl_status st)
{
    atomicCAS(status, 0u, (uint32_t) - (int)st);
}

template <class G, bool BASE> struct sp_encoder {
    typedef typename G::U U;
    const sp_gpu_encode_args &a;
    sp_encode_room &room;
    sp_worker w;
    uint32_t n_slices, parity;
    uint32_t waiting, waiting_bytes; // the slice whose frame waits in stage[parity ^ 1]; 0 bytes: none

    __device__ __forceinline__ U *run(uint32_t i) const
    {
        return (U *)(room.buf[i] + w.warp * G::WARP_BYTES);
    }
    __device__ __forceinline__ uint32_t elems(uint32_t s) const
    {
        return (uint32_t)min(a.n_elems - (uint64_t)s * a.slice_elems, (uint64_t)a.slice_elems);
    }
    __device__ __forceinline__ void load(uint32_t s, uint32_t buffer) const
    {
        if (s >= n_slices) {
            sp_copy_commit();
            return;
        }
        uint64_t from = (uint64_t)s * a.slice_elems;
        sp_slice_load<G>(w, run(buffer), (const U *)a.x + from, elems(s));
        if (BASE)
            sp_slice_load<G>(w, run(buffer ^ 1), (const U *)a.base + from, elems(s));
    }
    // Find the place of slice s, for all threads after the next barrier. Called by all, done by the last
    // warp.
    __device__ __forceinline__ void locate(uint32_t s, uint32_t bytes, uint64_t peek) const
    {
        if (w.warp == SP_WORKER_WARPS - 1) {
            uint64_t offset = sp_sums(a.scratch, n_slices).start_of(s, bytes, peek, w.lane);
            if (w.lane == 0) {
                room.offset = offset;
                a.offsets[s] = offset;
                if (s + 1 == n_slices)
                    a.offsets[n_slices] = offset + bytes;
                if (offset + bytes > a.dst_cap)
                    sp_tell_status(a.status, SPCCL_ERR_DST_SMALL);
            }
        }
    }
    // A frame on chip goes to the place that was found.
    __device__ __forceinline__ void copy_out(const uint8_t *frame, uint32_t bytes) const
    {
        if (room.offset + bytes <= a.dst_cap)
            for (uint32_t i = w.tid; i < bytes / 16; i += SP_GPU_WORKER_THREADS)
                sp_store16(a.dst + room.offset + i * 16, ((const uint4 *)frame)[i]);
    }
    __device__ __forceinline__ void write_dense(const U *from, uint32_t n, const sp_layout &at) const
    {
        uint8_t *dst = a.dst + room.offset;
        if (w.tid < 4)
            sp_store16(dst + w.tid * 16, sp_header_unit(w.tid, SPCCL_FORMAT_DENSE, a.dtype, false, n, n, at));
#pragma unroll
        for (uint32_t r = 0; r < G::ROWS; r++) {
            uint32_t off = SP_FRAME_HEADER_BYTES + w.warp * G::WARP_BYTES + (r * 32 + w.lane) * 16;
            if (off < at.bytes)
                sp_store16(dst + off, ((const uint4 *)from)[sp_unit_at(r * 32 + w.lane)]);
        }
    }
    // The frame that waits, if any, goes out. Ends without a barrier.
    __device__ __forceinline__ void flush(uint64_t peek)
    {
        if (waiting_bytes == 0)
            return;
        locate(waiting, waiting_bytes, peek);
        sp_bar_sync(w.bar);
        copy_out(room.stage[parity ^ 1], waiting_bytes);
        waiting_bytes = 0;
    }
    // Slice s, loaded in buffer `cur`.
    __device__ __forceinline__ void encode(uint32_t s, uint32_t cur)
    {
        bool ok;
        uint64_t peek = 0;
        uint32_t n = elems(s), format;
        const U *from = run(cur);
        sp_pici_scratch<G> *scratch = (sp_pici_scratch<G> *)room.scratch;
        if (w.warp == SP_WORKER_WARPS - 1 && waiting_bytes != 0)
            peek = sp_sums(a.scratch, n_slices).peek(waiting, w.lane);
        sp_scan<G> scan = sp_encode_scan<G, BASE>(w, from, run(cur ^ 1));
        sp_encode_tell<G>(w, scan, &room.counts, parity);
        sp_bar_sync(w.bar);
        sp_counts c = sp_encode_sum(w, &room.counts, parity);
        format = a.format == SPCCL_FORMAT_AUTO ? sp_choose_smallest<G::E>(n, c.nnz, c.full_block, BASE)
                                               : (uint32_t)a.format;
        ok = sp_allows(format, c.nnz, c.full_block, BASE);
        sp_layout at = sp_layout_cuda<G::E>(ok ? format : (uint32_t)SPCCL_FORMAT_EMPTY, n, c.nnz);
        if (w.tid == 0) {
            sp_sums(a.scratch, n_slices).tell(s, at.bytes);
            if (!ok)
                sp_tell_status(a.status, SPCCL_ERR_UNSUPPORTED);
        }
        if (ok && format != SPCCL_FORMAT_DENSE && at.bytes <= SP_STAGE_BYTES) {
            sp_encode_body<G>(w, from, scan, c, format, a.dtype, BASE, n, at, room.stage[parity], scratch);
            flush(peek);
            waiting = s;
            waiting_bytes = at.bytes;
            return;
        }
        flush(peek);
        sp_bar_sync(w.bar); // room.offset has been read
        locate(s, at.bytes, 0);
        sp_bar_sync(w.bar);
        if (!ok || room.offset + at.bytes > a.dst_cap)
            return;
        if (format == SPCCL_FORMAT_DENSE)
            write_dense(from, n, at);
        else
            sp_encode_body<G>(w, from, scan, c, format, a.dtype, BASE, n, at, a.dst + room.offset, scratch);
    }
};

template <int BYTES, bool BASE>
__global__ void __launch_bounds__(256, 3) sp_encode_kernel(const __grid_constant__ sp_gpu_encode_args a)
{
    typedef sp_geometry<typename sp_unsigned<BYTES>::type, 4> G;
    extern __shared__ __align__(16) uint8_t shared[];
    sp_encode_room &room = *(sp_encode_room *)shared;
    uint32_t n_slices = (uint32_t)((a.n_elems + a.slice_elems - 1) / a.slice_elems), cur = 0;
    sp_encoder<G, BASE> e = {a, room, sp_worker_here(), n_slices, 0, 0, 0};
    e.load(blockIdx.x, 0);
    for (uint32_t s = blockIdx.x; s < n_slices; s += gridDim.x) {
        if (BASE) { // both buffers are in use at once
            sp_copy_wait<0>();
        } else {
            e.load(s + gridDim.x, cur ^ 1);
            sp_copy_wait<1>();
        }
        __syncwarp();
        e.encode(s, cur);
        __syncwarp();
        e.parity ^= 1;
        if (BASE)
            e.load(s + gridDim.x, 0);
        else
            cur ^= 1;
    }
    sp_copy_wait<0>();
    sp_bar_sync(e.w.bar);
    e.flush(0);
}

// ---- decode ----

#define SP_PEEK_BYTES (SP_GPU_WORKER_THREADS * 16)

struct __align__(16) sp_decode_room
{
    uint8_t buf[SP_GPU_SLICE_BYTES];
    uint8_t frame[2][SP_PEEK_BYTES]; // short frames, or the start of long ones
    sp_view view[2];
    uint32_t trouble[2]; // 0, or minus the status of a header that is no good
};

__device__ __forceinline__ spccl_status sp_status_of(const sp_wrong &wrong)
{
    return wrong.rule == 3 ? SPCCL_ERR_VERSION : wrong.rule >= 29 ? SPCCL_ERR_FRAME : SPCCL_ERR_FORMAT;
}

// Look at the header of a frame; the first warp, whose lanes 0 to 3 hold it.
template <class G, bool SET>
__device__ __forceinline__ void sp_look(const sp_gpu_decode_args &a, sp_decode_room &room, uint32_t parity,
                                        uint4 unit, const uint8_t *whole, uint32_t bytes, uint32_t n,
                                        uint32_t lane)
{
    sp_view v;
    sp_wrong wrong;
    // The table of offsets must not leave bytes between frames.
    bool ok = sp_open<G::E>(unit, bytes, a.dtype, n, &v, &wrong);
    if (ok && v.at.bytes != bytes) {
        ok = false;
        wrong.rule = 17;
    }
    spccl_status st = !ok ? sp_status_of(wrong) : SET && v.is_delta != 0 ? SPCCL_ERR_FRAME : SPCCL_OK;
    if (lane != 0)
        return;
    v.p = ok && v.at.bytes <= SP_PEEK_BYTES ? room.frame[parity] : whole;
    room.view[parity] = v;
    room.trouble[parity] = (uint32_t) - (int)st;
    if (st != SPCCL_OK)
        sp_tell_status(a.status, st);
}

// One frame with a good header into dst [n]; APPLY(old, value) for the verbs that keep what is not listed.
// Whole worker.
template <class G, bool SET, class APPLY>
__device__ __forceinline__ void sp_decode_frame(const sp_worker &w, const sp_gpu_decode_args &a,
                                                const sp_view &v, typename G::U *dst, uint32_t n,
                                                uint8_t *buf, APPLY apply)
{
    typedef typename G::U U;
    U *run = (U *)(buf + w.warp * G::WARP_BYTES), *mine = dst + w.warp * G::WARP_ELEMS;
    bool ok;
    ok = w.warp > 2 || sp_padding_is_zero<G::E>(w, v);
    if (SET && v.format != SPCCL_FORMAT_EMPTY && v.format != SPCCL_FORMAT_DENSE) {
        sp_run_zero<G::WARP_BYTES / 16>(w, run);
        __syncwarp();
        ok &= sp_decode<G>(w, v, [&](uint32_t i, U x) { run[sp_elem_at<G>(i)] = x; });
    } else if (!SET) {
        ok &= sp_decode<G>(w, v, [](uint32_t, U) {});
    }
    if (!sp_bar_and(w.bar, ok)) {
        if (w.tid == 0)
            sp_tell_status(a.status, SPCCL_ERR_FORMAT);
        return;
    }
    if (!SET) {
        sp_decode<G>(w, v, [&](uint32_t i, U x) { mine[i] = apply(mine[i], x); });
    } else if (v.format == SPCCL_FORMAT_EMPTY) {
        sp_slice_store_zero<G>(w, dst, n);
    } else {
        if (v.format == SPCCL_FORMAT_DENSE) {
#pragma unroll
            for (uint32_t r = 0; r < G::ROWS; r++) {
                uint32_t off = w.warp * G::WARP_BYTES + (r * 32 + w.lane) * 16;
                if (off < n * G::E)
                    ((uint4 *)run)[sp_unit_at(r * 32 + w.lane)] = *(const uint4 *)(v.p + v.at.values + off);
            }
        }
        __syncwarp();
        sp_slice_store<G>(w, run, dst, n);
    }
}

// All frames; worker q takes slices q, q + workers, ... Two frames ahead its offsets are read, one ahead its
// start.
template <class G, bool SET, class APPLY>
__device__ __forceinline__ void sp_decode_all(const sp_gpu_decode_args &a, sp_decode_room &room, APPLY apply)
{
    typedef typename G::U U;
    sp_worker w = sp_worker_here();
    uint32_t n_slices = (uint32_t)((a.n_elems + a.slice_elems - 1) / a.slice_elems), parity = 0;
    uint64_t lo = 0, hi = 0, next_lo = 0, next_hi = 0;
    uint4 peek = make_uint4(0, 0, 0, 0);
    auto offsets = [&](uint64_t s, uint64_t *from, uint64_t *to) {
        *from = s < n_slices ? a.offsets[s] : 0;
        *to = s < n_slices ? a.offsets[s + 1] : 0;
        if (*from % 16 != 0 || *to > a.stream_bytes || *from > *to || *to - *from > 1u << 30)
            *to = *from = 0; // no bytes: refused as a frame that is cut off
    };
    auto look = [&](uint64_t from, uint64_t to) {
        uint64_t at = from + w.tid * 16;
        return at + 16 <= to ? sp_load16_l2(a.stream + at) : make_uint4(0, 0, 0, 0);
    };
    offsets(blockIdx.x, &lo, &hi);
    offsets((uint64_t)blockIdx.x + gridDim.x, &next_lo, &next_hi);
    peek = look(lo, hi);
    for (uint64_t s = blockIdx.x; s < n_slices; s += gridDim.x, parity ^= 1) {
        uint64_t from = s * a.slice_elems;
        uint32_t n = (uint32_t)min(a.n_elems - from, (uint64_t)a.slice_elems), bytes = (uint32_t)(hi - lo);
        const uint8_t *whole = a.stream + lo;
        ((uint4 *)room.frame[parity])[w.tid] = peek;
        if (w.warp == 0)
            sp_look<G, SET>(a, room, parity, peek, whole, bytes, n, w.lane);
        peek = look(next_lo, next_hi);
        lo = next_lo;
        hi = next_hi;
        offsets(s + 2 * (uint64_t)gridDim.x, &next_lo, &next_hi);
        sp_bar_sync(w.bar);
        if (room.trouble[parity] == 0)
            sp_decode_frame<G, SET>(w, a, room.view[parity], (U *)a.dst + from, n, room.buf, apply);
        if (SET)
            __syncwarp();
    }
}

template <int BYTES>
__global__ void __launch_bounds__(256, 4) sp_set_kernel(const __grid_constant__ sp_gpu_decode_args a)
{
    typedef sp_geometry<typename sp_unsigned<BYTES>::type, 4> G;
    __shared__ sp_decode_room room;
    sp_decode_all<G, true>(a, room, [](typename G::U, typename G::U x) { return x; });
}
template <int BYTES>
__global__ void __launch_bounds__(256, 4) sp_overwrite_kernel(const __grid_constant__ sp_gpu_decode_args a)
{
    typedef sp_geometry<typename sp_unsigned<BYTES>::type, 4> G;
    __shared__ sp_decode_room room;
    sp_decode_all<G, false>(a, room, [](typename G::U, typename G::U x) { return x; });
}
template <int DTYPE>
__global__ void __launch_bounds__(256, 4) sp_add_kernel(const __grid_constant__ sp_gpu_decode_args a)
{
    typedef sp_elem<DTYPE> T;
    typedef typename T::U U;
    typedef sp_geometry<U, 4> G;
    __shared__ sp_decode_room room;
    sp_decode_all<G, false>(a, room, [](U d, U x) { return T::narrow(T::add(T::widen(d), T::widen(x))); });
}

// ---- launching ----

typedef void (*sp_encode_fn)(const sp_gpu_encode_args);
typedef void (*sp_decode_fn)(const sp_gpu_decode_args);

// Index of a width in the tables below: 1, 2, 4, 8 bytes.
static int width_index(spccl_dtype dtype)
{
    size_t bytes = sp_dtype_bytes(dtype);
    return bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : 3;
}

// Blocks that fill the current device, no more than there are slices.
static spccl_status grid_of(const void *kernel, size_t shared, uint64_t n_slices, unsigned *out)
{
    int device = 0, n_sms = 0, each = 0;
    SP_TRY_CUDA(cudaGetDevice(&device));
    SP_TRY_CUDA(cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device));
    SP_TRY_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, SP_GPU_WORKER_THREADS, shared));
    if (each == 0)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "GPU %d has too little shared memory for the codec (%zu bytes a block)", device,
                       shared);
    *out = (unsigned)sp_min_size((size_t)n_slices, (size_t)n_sms * (size_t)each);
    return SPCCL_OK;
}

extern "C" size_t sp_encode_cuda_scratch_bytes(uint64_t n_slices)
{
    return (size_t)(n_slices + 2 * ((n_slices + 31) / 32)) * 8;
}

extern "C" spccl_status sp_encode_cuda(const sp_gpu_encode_args *a, void *stream)
{
    static const sp_encode_fn kernels[2][4] = {{sp_encode_kernel<1, false>, sp_encode_kernel<2, false>,
                                                sp_encode_kernel<4, false>, sp_encode_kernel<8, false>},
                                               {sp_encode_kernel<1, true>, sp_encode_kernel<2, true>,
                                                sp_encode_kernel<4, true>, sp_encode_kernel<8, true>}};
    const void *kernel = (const void *)kernels[a->base != nullptr][width_index(a->dtype)];
    uint64_t n_slices = (a->n_elems + a->slice_elems - 1) / a->slice_elems;
    void *params[] = {const_cast<sp_gpu_encode_args *>(a)};
    size_t shared = sizeof(sp_encode_room);
    unsigned grid = 0;
    SP_TRY_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    SP_TRY(grid_of(kernel, shared, n_slices, &grid));
    SP_TRY_CUDA(cudaMemsetAsync(a->status, 0, sizeof *a->status, (cudaStream_t)stream));
    SP_TRY_CUDA(cudaMemsetAsync(a->scratch, 0, sp_encode_cuda_scratch_bytes(n_slices), (cudaStream_t)stream));
    return sp_cuda_check(cudaLaunchCooperativeKernel(kernel, dim3(grid), dim3(SP_GPU_WORKER_THREADS), params,
                                                     shared, (cudaStream_t)stream),
                         "launch of the encode kernel");
}

static sp_decode_fn add_kernel_of(spccl_dtype dtype)
{
    switch (dtype) {
    case SPCCL_FLOAT32:
        return sp_add_kernel<SPCCL_FLOAT32>;
    case SPCCL_FLOAT16:
        return sp_add_kernel<SPCCL_FLOAT16>;
    case SPCCL_BFLOAT16:
        return sp_add_kernel<SPCCL_BFLOAT16>;
    case SPCCL_FLOAT64:
        return sp_add_kernel<SPCCL_FLOAT64>;
    case SPCCL_INT8:
    case SPCCL_UINT8: // integers wrap: the same bits
        return sp_add_kernel<SPCCL_UINT8>;
    case SPCCL_INT16:
        return sp_add_kernel<SPCCL_INT16>;
    case SPCCL_INT32:
        return sp_add_kernel<SPCCL_INT32>;
    case SPCCL_INT64:
        return sp_add_kernel<SPCCL_INT64>;
    default:
        return nullptr; // float8 is carried as bytes: refused above
    }
}

extern "C" spccl_status sp_decode_cuda(const sp_gpu_decode_args *a, void *stream)
{
    static const sp_decode_fn set[] = {sp_set_kernel<1>, sp_set_kernel<2>, sp_set_kernel<4>,
                                       sp_set_kernel<8>};
    static const sp_decode_fn overwrite[] = {sp_overwrite_kernel<1>, sp_overwrite_kernel<2>,
                                             sp_overwrite_kernel<4>, sp_overwrite_kernel<8>};
    sp_decode_fn kernel = a->verb == SPCCL_SET         ? set[width_index(a->dtype)]
                          : a->verb == SPCCL_OVERWRITE ? overwrite[width_index(a->dtype)]
                                                       : add_kernel_of(a->dtype);
    void *params[] = {const_cast<sp_gpu_decode_args *>(a)};
    unsigned grid = 0;
    if (kernel == nullptr)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "decode: no add of float8 (it is carried as bytes): set or overwrite");
    SP_TRY(grid_of((const void *)kernel, 0, (a->n_elems + a->slice_elems - 1) / a->slice_elems, &grid));
    SP_TRY_CUDA(cudaMemsetAsync(a->status, 0, sizeof *a->status, (cudaStream_t)stream));
    return sp_cuda_check(cudaLaunchKernel((const void *)kernel, dim3(grid), dim3(SP_GPU_WORKER_THREADS),
                                          params, 0, (cudaStream_t)stream),
                         "launch of the decode kernel");
}
