/* pruned_lists.h - how the GPUs of a host exchange pruned gradients (spccl_cuda_prune_all_reduce). A contract of
 * core/gpu and kernels/cuda.
 *
 * The pruning kernel of each rank lists what it sends, tile by tile, in its window of a memory channel
 * (spccl_channel.h), and signals the peers. Then a kernel of each rank reads the lists of all ranks and writes the
 * sums over its gradient. A window has two areas, which the calls use in turn (docs/ALGORITHMS.md says why two are
 * enough). An area has a head, the lists [n_tiles * SP_LISTS_PER_TILE], then the entries. */
#ifndef SP_PRUNED_LISTS_H
#define SP_PRUNED_LISTS_H

#include "core/contract/gpu.h"
#include "spccl_channel.h"

/* Each warp of the pruning kernel makes a list of the part of the tile that it prunes. */
#define SP_LISTS_PER_TILE 8u
/* A warp takes so many entries from the area at once, and may leave a part of them unused. */
#define SP_LISTS_CLAIM 256u

/* What a rank was called with. Another rank that finds something else reports it. */
#define SP_LISTS_OFF 256u
typedef struct sp_pruned_head {
    uint64_t n_elems;
    uint32_t n_whole, average;
    uint32_t lost_nonfinite; /* 1: inf or nan found no room; then element 0 of the result is a nan */
    uint32_t reserved;
} sp_pruned_head;

/* Entries [first, first + n) of the area. */
typedef struct sp_pruned_list {
    uint32_t first, n;
} sp_pruned_list;

typedef struct sp_pruned_entry {
    uint32_t index; /* of the element in its tile */
    uint32_t bits;  /* of the float32; not 0 */
} sp_pruned_entry;

typedef struct sp_pruned_sum_args {
    sp_gpu_prune_args prune; /* float32; options.scale is 1 */
    int rank, world_size;
    uint32_t max_ctas; /* of the kernel that sums; 0: as many as run at once */
    bool average;
    uint64_t n_elems;
    uint64_t area_bytes, entries_off; /* entries_off: in an area */
    /* Entries of an area. The first n_whole are for segments that are sent whole, and always suffice. */
    uint32_t n_whole, n_entries;
    spccl_memory_channel channels[SP_GPU_HOST_RANKS_MAX]; /* by rank; not that of this rank */
} sp_pruned_sum_args;

#endif
