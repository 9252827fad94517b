/* fuzz_boot.c - takes any bytes as what a peer published in the store: settings, and a name, a rate and an address for each
 * transport. What is found lies within these bytes. The transports of this host take any address without harm.
 * The committed inputs have the version of today in their head, which few others get past. */
#include "core/run/boot_links.h"
#include "fuzz.h"

#define WORLD_SIZE 2
#define SLICE_BYTES 65536

static sp_links links;

/* Endpoints of this rank, opened once: those that this machine has. */
static void open_endpoints(void)
{
    sp_endpoint_config config = {.world_size = WORLD_SIZE,
                                 .n_queues = 2,
                                 .queue_bytes = 65536,
                                 .open_control = sp_links_open_tcp,
                                 .owner = &links};
    EXPECT(sp_host_identity("fuzz", config.host) == SPCCL_OK);
    for (int i = 0; sp_transports[i] != NULL; i++)
        (void)sp_links_add(&links, sp_transports[i], &config);
}

static void try_transport(const sp_published *p, int i)
{
    const sp_transport *t = links.transports[i];
    sp_published_transport found, control = {0};
    char why[256] = "";
    if (!sp_published_find(p, t->name, &found))
        return;
    EXPECT(found.position >= 0 && found.address >= p->blob + SP_BOOT_HEAD_BYTES &&
           found.address + found.address_bytes <= p->blob + p->bytes);
    (void)sp_published_find(p, "tcp", &control);
    if (sp_links_reach(&links, i, &found, &control, why, sizeof why) && t->pair_mbps != NULL)
        (void)t->pair_mbps(links.endpoints[i], found.address, found.address_bytes, found.mbps);
    EXPECT(memchr(why, '\0', sizeof why) != NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static bool opened;
    static sp_published p;
    const sp_boot_config config = {
        .world_size = WORLD_SIZE, .name = "fuzz", .slice_bytes = SLICE_BYTES, .deadline_ns = 0};
    if (bytes > sizeof p.blob)
        return 0;
    if (!opened)
        open_endpoints();
    opened = true;
    p.bytes = bytes;
    memset(p.blob, 0xa5, sizeof p.blob); /* behind the bytes */
    memcpy(p.blob, data, p.bytes);
    if (sp_published_check(&config, 1, &p) != SPCCL_OK) {
        EXPECT(spccl_last_error()[0] != '\0');
        return 0;
    }
    for (int i = 0; i < links.n_endpoints; i++)
        try_transport(&p, i);
    return 0;
}
