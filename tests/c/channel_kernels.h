/* channel_kernels.h - kernels that use one-sided channels, for test_cuda_channels.c. */
#ifndef SP_CHANNEL_KERNELS_H
#define SP_CHANNEL_KERNELS_H

#include <cuda_runtime_api.h>
#include <spccl_channel.h>

/* One direction pair of an exchange: what a CTA sends and gets through one channel. */
struct exchange_item {
    spccl_memory_channel channel;
    uint64_t dst_off, own_off; /* where data goes in the peer's window, and comes in this rank's */
    uint32_t seed_out, seed_in;
    uint8_t *source; /* [bytes] GPU memory */
};
struct port_item {
    spccl_port_channel channel;
    uint64_t dst_off, own_off, src_off; /* src_off: in this rank's window */
    uint32_t seed_out, seed_in;
    const uint8_t *in; /* where data comes; NULL: in the window, at own_off */
    uint32_t
        one_trigger; /* 1: put and signal are one trigger, 2: the same with a flush; 0: two puts, then the signal */
};

enum channel_misuse {
    MISUSE_NO_SIGNAL,
    MISUSE_PAST_END,
    MISUSE_FAR_OFFSET,
    MISUSE_ODD_SIZE,
    MISUSE_ODD_SOURCE,
    MISUSE_NO_THREADS,
    MISUSE_FAR_THREAD
};

enum port_misuse {
    PORT_NO_SIGNAL,
    PORT_PAST_END,
    PORT_SOURCE_PAST_END, /* of a put with a signal */
    /* What lies in the FIFO is wrong, as if a kernel had bypassed spccl_device.cuh. */
    PORT_BAD_OP,
    PORT_BAD_NUMBER,
    PORT_BAD_RANGE,
    PORT_BAD_SIGNAL,
    PORT_BAD_MEMORY,
    PORT_TOO_MANY
};

#ifdef __cplusplus
extern "C" {
#endif

/* CTA i puts data through items[i] and compares what comes, `rounds` times. items, n_wrong: GPU memory. n_wrong:
 * wrong words, plus 1 << 20 for each CTA that a wait failed in. */
cudaError_t channel_exchange(const struct exchange_item *items, unsigned n_items, uint64_t bytes, int rounds,
                             uint32_t *n_wrong, cudaStream_t stream);
/* Do one wrong thing. *failed (GPU memory) = 1 if the channel's function returned false. */
cudaError_t channel_do_wrong(spccl_memory_channel channel, enum channel_misuse what, uint32_t *failed,
                             cudaStream_t stream);
cudaError_t port_exchange(const struct port_item *items, unsigned n_items, uint64_t bytes, int rounds,
                          uint32_t *n_wrong, cudaStream_t stream);
/* As channel_do_wrong. After a bad trigger it waits for a signal, which must fail. */
cudaError_t port_do_wrong(spccl_port_channel channel, enum port_misuse what, uint32_t *failed,
                          cudaStream_t stream);
/* Put 16 bytes n times in a row, then flush. *failed = 1 if that failed. */
cudaError_t port_put_many(spccl_port_channel channel, uint64_t n, uint32_t *failed, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
