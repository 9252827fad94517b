// encode_cuda.cu - turns an array in GPU memory into an encoded array, with one CTA per slice.
//
// The array is read once. While the frame of a slice waits in shared memory for its offset, the next slice is
// loaded. Least traffic: reads n * e bytes, writes the encoded array.
#include "kernels/cuda/columns.cuh"

// Frames of at most so many bytes wait in shared memory for their offset.
#define SP_WAITING_BYTES 2688u

// What the warps of a CTA tell each other about a slice.
struct sp_slice_totals {
    // [parity of the slice]: a warp may already write those of the next slice.
    uint32_t found[2][SP_CODEC_WARPS]; // nnz of each part, and SP_FULL_BLOCK
    uint8_t counts[2][SP_BLOCKS_MAX];  // the index section of format tile
    // Of one slice.
    uint32_t columns[SP_COLUMN_TOTALS]; // totals of sp_columns
    uint64_t offset;                    // where the frame starts in the encoded array
};
#define SP_FULL_BLOCK (1u << 31)

template <bool BASE> struct __align__(16) sp_encode_smem
{
    uint8_t buf[BASE ? 2 : 1][SP_GPU_SLICE_BYTES]; // the slice, and the base
    // The frame that waits, and the frame that is being written.
    uint8_t stage[2][SP_WAITING_BYTES];
    sp_slice_totals totals;
    uint64_t barriers[2][SP_CODEC_WARPS]; // one per part of each buffer
};

// Finds where the frame of a slice starts: the sum of the sizes of all frames before it. It looks back in two
// levels, so that one load per lane covers 32 groups of 32 slices. (After Merrill and Garland 2016,
// "Single-pass parallel prefix scan with decoupled look-back".) All words start at 0. Each word is written by
// one atomic or one store, and its value alone says what is known.
struct sp_sums {
    uint32_t n_slices;
    uint64_t *own;   // [n_slices]: 1 + bytes of the frame
    uint64_t *group; // [n_groups]: from bit 56 on how many frames of the group are known; below: their bytes
    uint64_t *all;   // [n_groups]: 1 + bytes of this group and of all groups before it

    __device__ __forceinline__ sp_sums(void *scratch, uint32_t n) : n_slices(n)
    {
        own = (uint64_t *)scratch;
        group = own + n_slices;
        all = group + (n_slices + 31) / 32;
    }
    // Publish that the frame of slice s has so many bytes. One thread.
    __device__ __forceinline__ void publish(uint32_t s, uint32_t bytes) const
    {
        sp_store_relaxed_gpu(own + s, 1 + (uint64_t)bytes);
        atomicAdd((unsigned long long *)group + s / 32, (1ull << 56) | bytes);
    }
    // Where slice s starts. One warp. Waits for the slices before it; their CTAs are running, as the launch
    // is cooperative. (Loading these words earlier was slower: unknown words must be loaded again.)
    __device__ __forceinline__ uint64_t start_of(uint32_t s, uint32_t bytes, uint32_t lane) const
    {
        uint32_t g = s / 32, in_group = s % 32;
        uint64_t sum = 0, v;
        do
            v = lane < in_group ? sp_load_relaxed_gpu(own + (s & ~31u) + lane) : 1;
        while (__any_sync(~0u, v == 0));
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

// Find where slice s starts and write it to the table of offsets. One warp.
__device__ __forceinline__ uint64_t sp_locate(const sp_gpu_encode_args &a, const sp_sums &sums, uint32_t lane,
                                              uint32_t s, uint32_t bytes)
{
    uint64_t offset = sums.start_of(s, bytes, lane);
    if (lane == 0) {
        a.offsets[s] = offset;
        if (s + 1 == sums.n_slices)
            a.offsets[s + 1] = offset + bytes;
        if (offset + bytes > a.dst_cap)
            sp_set_status(a.status, SPCCL_ERR_DST_SMALL);
    }
    return offset;
}
// The same for all warps of a CTA; calls cta.sync.
__device__ __forceinline__ uint64_t sp_locate_cta(const sp_gpu_encode_args &a, const sp_sums &sums,
                                                  const sp_codec_cta &cta, sp_slice_totals &totals,
                                                  uint32_t s, uint32_t bytes)
{
    if (cta.is_last()) {
        uint64_t offset = sp_locate(a, sums, cta.lane, s, bytes);
        if (cta.lane == 0)
            totals.offset = offset;
    }
    cta.sync();
    return totals.offset;
}

// One warp of a CTA, for a slice that becomes a pici frame. The values are collected in the slice's buffer.
template <int BYTES, bool BASE> struct sp_pici_encoder {
    typedef sp_codec_geometry<BYTES> T;
    typedef typename T::U U;
    typedef typename T::G G;
    typedef typename T::P P;
    const sp_gpu_encode_args &a;
    sp_encode_smem<BASE> &smem;
    sp_codec_cta cta;

    __device__ __forceinline__ sp_pici_encoder(const sp_gpu_encode_args &args, sp_encode_smem<BASE> &shared)
        : a(args), smem(shared)
    {
    }
    // Replace the slice in the buffer by its values and their padding.
    __device__ __forceinline__ void pack(sp_columns<G> &mine, uint32_t n, uint32_t nnz,
                                         const sp_layout &at) const
    {
        U *buf = (U *)smem.buf[0], *base = BASE ? (U *)smem.buf[BASE ? 1 : 0] : nullptr;
        if (n != G::MAX_ELEMS)
            fill_rest(n);
        mine.read(buf, base);
        mine.count(smem.totals.columns);
        mine.pack(buf);
        if (cta.is_last() && (nnz + cta.lane) * G::E < at.bytes - at.values)
            buf[nnz + cta.lane] = 0;
    }
    // Write this warp's part of the frame to dst. Comes after `pack` and cta.sync.
    __device__ __forceinline__ void write(const sp_columns<G> &mine, uint32_t n, uint32_t nnz,
                                          const sp_layout &at, uint8_t *dst) const
    {
        typedef sp_columns<G> C;
        uint32_t n_tiles = (n + 4095) / 4096, units = (at.bytes - at.values) / 16;
        for (uint32_t u = threadIdx.x; u < units; u += SP_CODEC_THREADS)
            sp_store16(dst + at.values + u * 16, ((const uint4 *)smem.buf[0])[u]);
#pragma unroll
        for (uint32_t t = 0; t < C::N_PICI_TILES; t++)
#pragma unroll
            for (uint32_t c = 0; c < C::EACH; c++)
                if (mine.tile + t < n_tiles)
                    ((uint64_t *)(dst + at.meta))[(mine.tile + t) * 64 + mine.column + c] =
                        mine.bits[t * C::EACH + c];
        if (cta.warp == 0 && cta.lane < SP_COLUMN_TOTALS) {
            uint32_t prefix = 0; // of tile number `lane`; past the last tile: padding
#pragma unroll
            for (uint32_t i = 0; i < G::PICI_TILES * C::SHARED_BY; i++)
                prefix += i / C::SHARED_BY < cta.lane && cta.lane < n_tiles ? smem.totals.columns[i] : 0;
            ((uint32_t *)(dst + at.index))[cta.lane] = prefix;
            ((uint4 *)dst)[cta.lane] = sp_header_unit(cta.lane, SPCCL_FORMAT_PICI, a.dtype, BASE, n, nnz, at);
        }
    }
    // Fill up a slice of n elements, and its base, with zeros to the end of the buffer.
    __device__ __forceinline__ void fill_rest(uint32_t n) const
    {
        uint32_t last = (n - 1) / P::MAX_ELEMS;
        uint32_t filled = last * P::MAX_ELEMS + sp_filled<P>(n - last * P::MAX_ELEMS);
        for (uint32_t u = filled / G::K + threadIdx.x; u < G::UNITS; u += SP_CODEC_THREADS)
            for (uint32_t i = 0; i < (BASE ? 2 : 1); i++)
                ((uint4 *)smem.buf[i])[u] = make_uint4(0, 0, 0, 0);
        cta.sync();
    }
    __device__ __forceinline__ void run(uint32_t n_slices, uint32_t s, uint32_t n, uint32_t nnz) const
    {
        sp_layout at = sp_layout_cuda<G::E>(SPCCL_FORMAT_PICI, n, nnz);
        sp_columns<G> mine(cta);
        pack(mine, n, nnz, at); // meanwhile other CTAs publish the sizes of earlier frames
        uint64_t offset = sp_locate_cta(a, sp_sums(a.scratch, n_slices), cta, smem.totals, s, at.bytes);
        if (offset + at.bytes <= a.dst_cap)
            write(mine, n, nnz, at, a.dst + offset);
    }
};
// Not inlined: it needs all registers, and the rest of the kernel would get too few.
template <int BYTES, bool BASE>
__device__ __noinline__ void sp_encode_pici_slice(const sp_gpu_encode_args &a, uint32_t n_slices, uint32_t s,
                                                  uint32_t n, uint32_t nnz)
{
    sp_pici_encoder<BYTES, BASE>(a, *(sp_encode_smem<BASE> *)sp_block_shared()).run(n_slices, s, n, nnz);
}

// One warp of a cta.
template <int BYTES, bool BASE> struct sp_encoder {
    typedef sp_codec_geometry<BYTES> T;
    typedef typename T::U U;
    typedef typename T::G G;
    typedef typename T::P P;
    const sp_gpu_encode_args &a;
    sp_encode_smem<BASE> &smem;
    sp_codec_cta cta;
    sp_sums sums;
    uint32_t parity;
    uint32_t waiting, waiting_bytes; // slice whose frame waits in stage[parity ^ 1]; 0 bytes: none
    sp_loader<P, 0> loader, base_loader;

    __device__ __forceinline__ sp_encoder(const sp_gpu_encode_args &args, sp_encode_smem<BASE> &shared,
                                          uint32_t n)
        : a(args), smem(shared), sums(args.scratch, n), parity(0), waiting(0), waiting_bytes(0),
          loader(cta.lane, shared.barriers[0] + cta.warp),
          base_loader(cta.lane, shared.barriers[1] + cta.warp)
    {
    }
    // Elements of slice s.
    __device__ __forceinline__ uint32_t elems(uint32_t s) const
    {
        return (uint32_t)min(a.n_elems - (uint64_t)s * a.slice_elems, (uint64_t)a.slice_elems);
    }
    // This warp's part of slice s: in an array, and in a buffer.
    __device__ __forceinline__ const U *at(const void *array, uint32_t s) const
    {
        return (const U *)array + (uint64_t)s * a.slice_elems + cta.warp * P::MAX_ELEMS;
    }
    __device__ __forceinline__ U *part_of(uint32_t i) const
    {
        return (U *)smem.buf[i] + cta.warp * P::MAX_ELEMS;
    }
    __device__ __forceinline__ void load(uint32_t s) const
    {
        if (s >= sums.n_slices)
            return;
        uint32_t n = T::elems(elems(s), cta.warp);
        loader.start(cta.lane, 0, part_of(0), at(a.x, s), n);
        if (BASE)
            base_loader.start(cta.lane, 0, part_of(BASE ? 1 : 0), at(a.base, s), n);
    }
    __device__ __forceinline__ void loaded(uint32_t s)
    {
        uint32_t n = T::elems(elems(s), cta.warp);
        loader.finish(cta.lane, 0, part_of(0), at(a.x, s), n);
        if (BASE)
            base_loader.finish(cta.lane, 0, part_of(BASE ? 1 : 0), at(a.base, s), n);
    }
    // Write out the frame that waits, if there is one. The last warp does it, as the first one writes
    // headers.
    __device__ __forceinline__ void flush()
    {
        if (waiting_bytes != 0 && cta.is_last()) {
            uint64_t offset = sp_locate(a, sums, cta.lane, waiting, waiting_bytes);
            if (offset + waiting_bytes <= a.dst_cap)
                for (uint32_t i = cta.lane * 16; i < waiting_bytes; i += 512)
                    sp_store16(a.dst + offset + i, *(const uint4 *)(smem.stage[parity ^ 1] + i));
        }
        waiting_bytes = 0;
    }
    // Write this warp's entries of a frame of format empty, tile or coo. The first warp also writes all else.
    __device__ __forceinline__ void write_listed(const sp_scan<P> &scan, uint32_t format, uint32_t n,
                                                 uint32_t nnz, uint32_t before, const sp_layout &at,
                                                 uint8_t *frame) const
    {
        if (cta.warp == 0) {
            if (cta.lane < 4)
                ((uint4 *)frame)[cta.lane] = sp_header_unit(cta.lane, format, a.dtype, BASE, n, nnz, at);
            if (format != SPCCL_FORMAT_EMPTY)
                sp_padding_write_bytes<G::E>(cta.lane, frame, format, n, nnz, at);
            if (format == SPCCL_FORMAT_TILE)
                for (uint32_t b = cta.lane; b < (n + SP_TILE_ELEMS - 1) / SP_TILE_ELEMS; b += 32)
                    frame[at.index + b] = smem.totals.counts[parity][b];
        }
        if (format != SPCCL_FORMAT_EMPTY)
            sp_encode_entries<P>(cta.lane, part_of(0), scan, format, at, frame, before,
                                 cta.warp * P::MAX_ELEMS);
    }
    // Encode slice s, whose part of this warp has been loaded, and start to load slice `next`.
    __device__ __forceinline__ void encode(uint32_t s, uint32_t next)
    {
        uint32_t n = elems(s), format, nnz = 0, before = 0;
        bool full_block = false, ok;
        sp_scan<P> scan = sp_encode_scan<P, BASE, P::ROWS>(
            cta.lane, part_of(0), part_of(BASE ? 1 : 0), T::elems(n, cta.warp),
            smem.totals.counts[parity] + cta.warp * P::N_BLOCKS);
        if (cta.lane == 0)
            smem.totals.found[parity][cta.warp] = scan.nnz | (scan.full_block ? SP_FULL_BLOCK : 0);
        cta.sync();
#pragma unroll
        for (uint32_t w = 0; w < SP_CODEC_WARPS; w++) {
            uint32_t found = smem.totals.found[parity][w];
            before += w < cta.warp ? found & ~SP_FULL_BLOCK : 0;
            nnz += found & ~SP_FULL_BLOCK;
            full_block |= (found & SP_FULL_BLOCK) != 0;
        }
        format = a.format == SPCCL_FORMAT_AUTO ? sp_choose_smallest<G::E>(n, nnz, full_block, BASE)
                                               : (uint32_t)a.format;
        ok = sp_allows(format, nnz, full_block, BASE);
        sp_layout layout = sp_layout_cuda<G::E>(ok ? format : (uint32_t)SPCCL_FORMAT_EMPTY, n, nnz);
        if (cta.is_first()) {
            sums.publish(s, layout.bytes);
            if (!ok)
                sp_set_status(a.status, SPCCL_ERR_UNSUPPORTED);
        }
        if (ok && format != SPCCL_FORMAT_DENSE && format != SPCCL_FORMAT_PICI &&
            layout.bytes <= SP_WAITING_BYTES) {
            write_listed(scan, format, n, nnz, before, layout, smem.stage[parity]);
            __syncwarp();
            load(next);
            flush();
            // The frame is written out in the next call, as all warps must have finished it: cta.sync comes
            // there.
            waiting = s;
            waiting_bytes = layout.bytes;
        } else {
            flush();
            if (ok && format == SPCCL_FORMAT_PICI) {
                sp_encode_pici_slice<BYTES, BASE>(a, sums.n_slices, s, n, nnz);
            } else {
                uint64_t offset = sp_locate_cta(a, sums, cta, smem.totals, s, layout.bytes);
                if (ok && offset + layout.bytes <= a.dst_cap)
                    write(scan, format, n, nnz, before, layout, a.dst + offset);
            }
            sp_slice_written(); // before copies write to the buffer
            cta.sync();
            load(next);
        }
        parity ^= 1;
    }
    // Write this warp's part of a frame that is not pici to dst.
    __device__ __forceinline__ void write(const sp_scan<P> &scan, uint32_t format, uint32_t n, uint32_t nnz,
                                          uint32_t before, const sp_layout &layout, uint8_t *dst) const
    {
        if (format == SPCCL_FORMAT_DENSE)
            sp_encode_dense<G, SP_CODEC_WARPS>(
                cta.lane, (const U *)smem.buf[0], a.dtype, n, layout,
                [&](uint32_t off, uint4 v) { sp_store16(dst + off, v); }, cta.warp);
        else
            write_listed(scan, format, n, nnz, before, layout, dst);
    }
    __device__ __forceinline__ void run()
    {
        load(blockIdx.x);
        for (uint32_t s = blockIdx.x; s < sums.n_slices; s += gridDim.x) {
            loaded(s);
            encode(s, s + gridDim.x);
        }
        cta.sync();
        flush();
    }
};

template <int BYTES, bool BASE>
__global__ void __launch_bounds__(SP_CODEC_THREADS, BASE ? 6 : 10)
    sp_encode_kernel(const __grid_constant__ sp_gpu_encode_args a)
{
    uint32_t n_slices = (uint32_t)((a.n_elems + a.slice_elems - 1) / a.slice_elems);
    sp_encoder<BYTES, BASE>(a, *(sp_encode_smem<BASE> *)sp_block_shared(), n_slices).run();
}

// ---- launching ----

typedef void (*sp_encode_fn)(const sp_gpu_encode_args);

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
    sp_encode_fn kernel = kernels[a->base != nullptr][sp_width_index(a->dtype)];
    uint64_t n_slices = (a->n_elems + a->slice_elems - 1) / a->slice_elems;
    void *params[] = {const_cast<sp_gpu_encode_args *>(a)};
    size_t shared = a->base != nullptr ? sizeof(sp_encode_smem<true>) : sizeof(sp_encode_smem<false>);
    uint32_t grid = 0;
    SP_TRY_CUDA(
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    SP_TRY(sp_codec_grid((const void *)kernel, shared, n_slices, &grid));
    SP_TRY_CUDA(cudaMemsetAsync(a->status, 0, sizeof *a->status, (cudaStream_t)stream));
    SP_TRY_CUDA(cudaMemsetAsync(a->scratch, 0, sp_encode_cuda_scratch_bytes(n_slices), (cudaStream_t)stream));
    return sp_cuda_check(cudaLaunchCooperativeKernel(kernel, dim3(grid), dim3(SP_CODEC_THREADS), params,
                                                     shared, (cudaStream_t)stream),
                         "launch of the encode kernel");
}
