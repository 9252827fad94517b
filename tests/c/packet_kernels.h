/* packet_kernels.h - kernels that use packets, gets and barriers of blocks, for test_cuda_packets.c. */
#ifndef SP_PACKET_KERNELS_H
#define SP_PACKET_KERNELS_H

#include <cuda_runtime_api.h>
#include <spccl_channel.h>

/* What a CTA exchanges with the peer of a channel, `rounds` times. */
struct packet_job {
    spccl_memory_channel channel;
    uint64_t bytes;           /* of data */
    uint64_t out_off, in_off; /* where packets go in the peer's window, and come in this rank's */
    uint32_t seed_out, seed_in;
    uint8_t *scratch; /* [2 * bytes] GPU memory */
};

enum packet_misuse {
    PACKET_LATE,        /* waits for packets that nobody puts */
    PACKET_HALF,        /* the same of 16 bytes, of which only the first 8 have come */
    PACKET_PAST_END,    /* a put of packets: the data would fit, the packets do not */
    PACKET_ODD_OFFSET,  /* of 16 bytes, at a multiple of 8 */
    PACKET_ODD_DATA,    /* 4 bytes of data in packets of 16 */
    PACKET_NO_FLAG,     /* flag 0 */
    PACKET_GET_OUTSIDE, /* packets outside of this rank's window */
    GET_PAST_END,
    GET_ODD_ADDRESS,
    BLOCKS_MISSING /* a barrier of 3 blocks, called by 2 */
};

#ifdef __cplusplus
extern "C" {
#endif

/* Rounds of an exchange, from number `first` on: flags are round + 1. */
struct packet_rounds {
    int first, n;
};

/* CTA i works on jobs[i]. jobs, n_wrong: GPU memory. n_wrong: wrong words, plus 1 << 20 for each CTA that failed. */
cudaError_t packet_exchange(const struct packet_job *jobs, unsigned n_jobs, uint32_t packet_bytes,
                            struct packet_rounds rounds, uint32_t *n_wrong, cudaStream_t stream);
/* The same by gets: each rank fills its window at in_off, and the peer copies that. */
cudaError_t get_exchange(const struct packet_job *jobs, unsigned n_jobs, struct packet_rounds rounds,
                         uint32_t *n_wrong, cudaStream_t stream);
/* n_blocks CTAs meet `rounds` times, and look for what all others stored before. slots: [16 * n_blocks] GPU memory. */
cudaError_t blocks_meet(spccl_memory_channel channel, unsigned n_blocks, int rounds, uint8_t *slots,
                        uint32_t *n_wrong, cudaStream_t stream);
/* Do one wrong thing. *failed (GPU memory) = 1 if the channel's function returned false. */
cudaError_t packet_do_wrong(spccl_memory_channel channel, enum packet_misuse what, uint32_t *failed,
                            cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
