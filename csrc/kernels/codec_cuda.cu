// codec_cuda.cu - arrays in GPU memory to streams of frames and back, a warp for each slice.
//
// Encode reads the array once: while the frame of one slice waits on chip for its place in the stream, the
// next slice is loaded. Decode finds each frame by the table of offsets that encode wrote. Bytes moved,
// floor: encode reads n * e and writes the stream; decode reads the stream and writes n * e.
#include "cuda_check.h"
#include "decode.cuh"
#include "kernels_cuda.h"

// ---- encode ----

// Frames of at most so many bytes wait on chip for their place.
#define SP_WAITING_BYTES 2688u
static_assert(SP_WAITING_BYTES >= SP_PICI_STAGE_BYTES, "room for pici");

template <bool BASE> struct __align__(16) sp_encode_room
{
    uint8_t buf[BASE ? 2 : 1][SP_GPU_SLICE_BYTES]; // the slice, and the base
    uint8_t stage[2][SP_WAITING_BYTES];
    uint8_t counts[SP_BLOCKS_MAX];
    uint64_t barriers[2]; // of the buffers
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
    sp_encode_room<BASE> &room;
    uint32_t lane, n_slices, parity;
    uint32_t waiting, waiting_bytes; // the slice whose frame waits in stage[parity ^ 1]; 0 bytes: none
    sp_loader<G, 0> loader, base_loader;

    __device__ __forceinline__ sp_encoder(const sp_gpu_encode_args &args, sp_encode_room<BASE> &shared,
                                          uint32_t n)
        : a(args), room(shared), lane(threadIdx.x), n_slices(n), parity(0), waiting(0), waiting_bytes(0),
          loader(lane, shared.barriers), base_loader(lane, shared.barriers + 1)
    {
    }
    __device__ __forceinline__ uint32_t elems(uint32_t s) const
    {
        return (uint32_t)min(a.n_elems - (uint64_t)s * a.slice_elems, (uint64_t)a.slice_elems);
    }
    __device__ __forceinline__ const U *at(const void *array, uint32_t s) const
    {
        return (const U *)array + (uint64_t)s * a.slice_elems;
    }
    __device__ __forceinline__ void load(uint32_t s) const
    {
        if (s >= n_slices)
            return;
        loader.start(lane, 0, (U *)room.buf[0], at(a.x, s), elems(s));
        if (BASE)
            base_loader.start(lane, 0, (U *)room.buf[BASE ? 1 : 0], at(a.base, s), elems(s));
    }
    __device__ __forceinline__ void loaded(uint32_t s)
    {
        loader.finish(lane, 0, (U *)room.buf[0], at(a.x, s), elems(s));
        if (BASE)
            base_loader.finish(lane, 0, (U *)room.buf[BASE ? 1 : 0], at(a.base, s), elems(s));
    }
    // The place of slice s in the stream.
    __device__ __forceinline__ uint64_t locate(uint32_t s, uint32_t bytes) const
    {
        sp_sums sums(a.scratch, n_slices);
        uint64_t offset = sums.start_of(s, bytes, sums.peek(s, lane), lane);
        if (lane == 0) {
            a.offsets[s] = offset;
            if (s + 1 == n_slices)
                a.offsets[n_slices] = offset + bytes;
            if (offset + bytes > a.dst_cap)
                sp_tell_status(a.status, SPCCL_ERR_DST_SMALL);
        }
        return offset;
    }
    // The frame that waits, if any, goes out.
    __device__ __forceinline__ void flush()
    {
        uint64_t offset;
        if (waiting_bytes == 0)
            return;
        offset = locate(waiting, waiting_bytes);
        if (offset + waiting_bytes <= a.dst_cap)
            for (uint32_t i = lane * 16; i < waiting_bytes; i += 512)
                sp_store16(a.dst + offset + i, *(const uint4 *)(room.stage[parity ^ 1] + i));
        waiting_bytes = 0;
    }
    // Slice s, which has been loaded; starts to load slice `next`.
    __device__ __forceinline__ void encode(uint32_t s, uint32_t next)
    {
        const U *buf = (const U *)room.buf[0], *base = (const U *)room.buf[BASE ? 1 : 0];
        uint32_t n = elems(s), format;
        bool ok;
        sp_scan<G> scan = sp_encode_scan<G, BASE>(lane, buf, base, n, room.counts);
        format = a.format == SPCCL_FORMAT_AUTO ? sp_choose_smallest<G::E>(n, scan.nnz, scan.full_block, BASE)
                                               : (uint32_t)a.format;
        ok = sp_allows(format, scan.nnz, scan.full_block, BASE);
        sp_layout at = sp_layout_cuda<G::E>(ok ? format : (uint32_t)SPCCL_FORMAT_EMPTY, n, scan.nnz);
        if (lane == 0) {
            sp_sums(a.scratch, n_slices).tell(s, at.bytes);
            if (!ok)
                sp_tell_status(a.status, SPCCL_ERR_UNSUPPORTED);
        }
        __syncwarp();
        if (ok && format != SPCCL_FORMAT_DENSE && format != SPCCL_FORMAT_PICI &&
            at.bytes <= SP_WAITING_BYTES) {
            sp_encode_listed<G>(lane, buf, scan, format, a.dtype, BASE, n, at, room.stage[parity],
                                room.counts);
            __syncwarp();
            load(next);
            flush();
            waiting = s;
            waiting_bytes = at.bytes;
        } else {
            flush();
            uint64_t offset = locate(s, at.bytes);
            if (ok && offset + at.bytes <= a.dst_cap)
                write(scan, n, format, at, a.dst + offset);
            __syncwarp();
            load(next);
        }
        parity ^= 1;
    }
    // A frame straight to its place.
    __device__ __forceinline__ void write(const sp_scan<G> &scan, uint32_t n, uint32_t format,
                                          const sp_layout &at, uint8_t *dst) const
    {
        const U *buf = (const U *)room.buf[0], *base = (const U *)room.buf[BASE ? 1 : 0];
        auto out = [&](uint32_t off, uint4 v) { sp_store16(dst + off, v); };
        if (format == SPCCL_FORMAT_DENSE)
            sp_encode_dense<G>(lane, buf, a.dtype, n, at, out);
        else if (format == SPCCL_FORMAT_PICI)
            sp_encode_pici<G, BASE>(lane, buf, base, a.dtype, n, scan.nnz, at, (U *)room.stage[parity], out);
        else
            sp_encode_listed<G>(lane, buf, scan, format, a.dtype, BASE, n, at, dst, room.counts);
    }
};

template <int BYTES, bool BASE>
__global__ void __launch_bounds__(32, BASE ? 6 : 10)
    sp_encode_kernel(const __grid_constant__ sp_gpu_encode_args a)
{
    typedef sp_geometry<typename sp_unsigned<BYTES>::type, SP_GPU_SLICE_BYTES> G;
    uint32_t n_slices = (uint32_t)((a.n_elems + a.slice_elems - 1) / a.slice_elems);
    sp_encoder<G, BASE> e(a, *(sp_encode_room<BASE> *)sp_block_shared(), n_slices);
    e.load(blockIdx.x);
    for (uint32_t s = blockIdx.x; s < n_slices; s += gridDim.x) {
        e.loaded(s);
        e.encode(s, s + gridDim.x);
    }
    e.flush();
}

// ---- decode ----

// Of each frame so many bytes are fetched ahead; a longer one is read where it lies.
#define SP_PEEK_BYTES 2560u

struct __align__(16) sp_decode_room
{
    uint8_t buf[SP_GPU_SLICE_BYTES];
    uint8_t frame[2][SP_PEEK_BYTES];
};

__device__ __forceinline__ spccl_status sp_status_of(const sp_wrong &wrong)
{
    return wrong.rule == 3 ? SPCCL_ERR_VERSION : wrong.rule >= 29 ? SPCCL_ERR_FRAME : SPCCL_ERR_FORMAT;
}

// Adding to, or overwriting, what is listed; APPLY(old, value).
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

// One frame of `bytes` bytes, which starts at `start` on chip and is whole at `whole`, into dst [n].
template <class G, bool SET, class APPLY>
__device__ __forceinline__ spccl_status sp_decode_frame(uint32_t lane, const sp_gpu_decode_args &a,
                                                        const uint8_t *start, const uint8_t *whole,
                                                        uint32_t bytes, typename G::U *dst, uint32_t n,
                                                        uint8_t *buf, APPLY apply)
{
    typedef typename G::U U;
    sp_sink_none<G> none;
    sp_sink_apply<G, APPLY> sink = {dst, apply};
    sp_view v;
    sp_wrong wrong;
    bool ok;
    if (!sp_open<G::E>((const uint4 *)start, bytes, a.dtype, n, &v, &wrong))
        return sp_status_of(wrong);
    if (v.at.bytes != bytes) // the table of offsets must not leave bytes between frames
        return SPCCL_ERR_FORMAT;
    if (SET && v.is_delta != 0)
        return SPCCL_ERR_FRAME;
    v.p = bytes <= SP_PEEK_BYTES ? start : whole;
    v.values = v.p + v.at.values;
    ok = sp_padding_is_zero<G::E>(lane, v);
    if (SET)
        return sp_decode_store<G, true>(lane, v, (U *)buf, dst, ok) ? SPCCL_OK : SPCCL_ERR_FORMAT;
    if (!__all_sync(~0u, sp_decode<G, false>(lane, v, none) && ok))
        return SPCCL_ERR_FORMAT;
    sp_decode<G, false>(lane, v, sink);
    return SPCCL_OK;
}

// All frames; worker q takes slices q, q + workers, ... Two frames ahead its offsets are read, one ahead its
// start.
template <class G, bool SET, class APPLY>
__device__ __forceinline__ void sp_decode_all(const sp_gpu_decode_args &a, APPLY apply)
{
    typedef typename G::U U;
    sp_decode_room &room = *(sp_decode_room *)sp_block_shared();
    uint32_t lane = threadIdx.x, parity = 0;
    uint64_t n_slices = (a.n_elems + a.slice_elems - 1) / a.slice_elems, lo, hi, next_lo, next_hi;
    auto offsets = [&](uint64_t s, uint64_t *from, uint64_t *to) {
        *from = s < n_slices ? a.offsets[s] : 0;
        *to = s < n_slices ? a.offsets[s + 1] : 0;
    };
    auto fetch = [&](uint64_t *from, uint64_t *to, uint8_t *frame) {
        if (*from % 16 != 0 || *to > a.stream_bytes || *from > *to || *to - *from > 1u << 30)
            *to = *from = 0; // no bytes: refused as a frame that is cut off
        for (uint32_t i = lane * 16; i < SP_PEEK_BYTES && i + 16 <= *to - *from; i += 512)
            sp_copy16_async(frame + i, a.stream + *from + i);
        sp_copy_commit();
    };
    offsets(blockIdx.x, &lo, &hi);
    offsets((uint64_t)blockIdx.x + gridDim.x, &next_lo, &next_hi);
    fetch(&lo, &hi, room.frame[0]);
    for (uint64_t s = blockIdx.x; s < n_slices; s += gridDim.x, parity ^= 1) {
        uint64_t from = s * a.slice_elems;
        uint32_t n = (uint32_t)min(a.n_elems - from, (uint64_t)a.slice_elems), bytes = (uint32_t)(hi - lo);
        const uint8_t *whole = a.stream + lo;
        fetch(&next_lo, &next_hi, room.frame[parity ^ 1]);
        lo = next_lo;
        hi = next_hi;
        offsets(s + 2 * (uint64_t)gridDim.x, &next_lo, &next_hi);
        sp_copy_wait<1>();
        __syncwarp();
        spccl_status st = sp_decode_frame<G, SET>(lane, a, room.frame[parity], whole, bytes,
                                                  (U *)a.dst + from, n, room.buf, apply);
        if (st != SPCCL_OK && lane == 0)
            sp_tell_status(a.status, st);
        __syncwarp();
    }
    sp_slice_stored(lane);
}

template <int BYTES>
__global__ void __launch_bounds__(32, 10) sp_set_kernel(const __grid_constant__ sp_gpu_decode_args a)
{
    typedef sp_geometry<typename sp_unsigned<BYTES>::type, SP_GPU_SLICE_BYTES> G;
    sp_decode_all<G, true>(a, [](typename G::U, typename G::U x) { return x; });
}
template <int BYTES>
__global__ void __launch_bounds__(32, 10) sp_overwrite_kernel(const __grid_constant__ sp_gpu_decode_args a)
{
    typedef sp_geometry<typename sp_unsigned<BYTES>::type, SP_GPU_SLICE_BYTES> G;
    sp_decode_all<G, false>(a, [](typename G::U, typename G::U x) { return x; });
}
template <int DTYPE>
__global__ void __launch_bounds__(32, 10) sp_add_kernel(const __grid_constant__ sp_gpu_decode_args a)
{
    typedef sp_elem<DTYPE> T;
    typedef typename T::U U;
    typedef sp_geometry<U, SP_GPU_SLICE_BYTES> G;
    sp_decode_all<G, false>(a, [](U d, U x) { return T::narrow(T::add(T::widen(d), T::widen(x))); });
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
    SP_TRY_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, 32, shared));
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
    sp_encode_fn kernel = kernels[a->base != nullptr][width_index(a->dtype)];
    uint64_t n_slices = (a->n_elems + a->slice_elems - 1) / a->slice_elems;
    void *params[] = {const_cast<sp_gpu_encode_args *>(a)};
    size_t shared = a->base != nullptr ? sizeof(sp_encode_room<true>) : sizeof(sp_encode_room<false>);
    unsigned grid = 0;
    SP_TRY_CUDA(
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    SP_TRY(grid_of((const void *)kernel, shared, n_slices, &grid));
    SP_TRY_CUDA(cudaMemsetAsync(a->status, 0, sizeof *a->status, (cudaStream_t)stream));
    SP_TRY_CUDA(cudaMemsetAsync(a->scratch, 0, sp_encode_cuda_scratch_bytes(n_slices), (cudaStream_t)stream));
    return sp_cuda_check(
        cudaLaunchCooperativeKernel(kernel, dim3(grid), dim3(32), params, shared, (cudaStream_t)stream),
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
    SP_TRY(grid_of((const void *)kernel, sizeof(sp_decode_room),
                   (a->n_elems + a->slice_elems - 1) / a->slice_elems, &grid));
    SP_TRY_CUDA(cudaMemsetAsync(a->status, 0, sizeof *a->status, (cudaStream_t)stream));
    return sp_cuda_check(
        cudaLaunchKernel(kernel, dim3(grid), dim3(32), params, sizeof(sp_decode_room), (cudaStream_t)stream),
        "launch of the decode kernel");
}
