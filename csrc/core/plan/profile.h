/* profile.h - what the tuner (tuner.h) has learnt, as a text file that later groups load. The text is
 *
 *   spccl-profile 1
 *   machine version=0.2.0 cpu=AMD_EPYC_7R13 cores=8 kernels=avx512 transports=inproc,shm,ib,ncclnet,tcp
 *   best coll=all_reduce dtype=float32 ranks=8 hosts=4 per-host=2 elems=4194304 density=1/64 schedule=relayed
 *     slice=61440 time=0.91                                                    (one line; hosts=1: per-host=ranks)
 *
 * A profile counts on the machine of its second line only. Ranks compare hashes of the lines that their group may use: if
 * those of two ranks differ, none counts. Reading and writing the text are pure functions; profile_file.c has files. */
#ifndef SP_PROFILE_H
#define SP_PROFILE_H

#include "core/plan/tuner.h"

#define SP_PROFILE_LINES 256           /* the oldest ones are left out */
#define SP_PROFILE_BYTES_MAX (1 << 16) /* of the text */
#define SP_MACHINE_CAP 400

typedef struct sp_profile_line {
    sp_tune_key key;
    uint16_t n_ranks, n_hosts, per_host; /* per_host: of the host with the most */
    sp_setting best;
    double ratio; /* its time over that of the model's choice */
} sp_profile_line;

typedef struct sp_profile {
    int n;
    sp_profile_line lines[SP_PROFILE_LINES];
} sp_profile;

/* Read a text. machine: of this process. Errors: SETTING (the text says which line and what is wrong, or of which other
 * machine or version the profile is). */
spccl_status sp_profile_parse(const char *text, size_t bytes, const char *machine, sp_profile *out);
/* Write the text; cap: SP_PROFILE_BYTES_MAX is enough. Returns its length. */
size_t sp_profile_print(const sp_profile *p, const char *machine, char *text, size_t cap);
/* The line for a kind of call: of the nearest number of elements, at most twice or half as many; of two, the fewer.
 * So the order of the lines does not count. NULL: none. */
const sp_profile_line *sp_profile_find(const sp_profile *p, const sp_profile_line *like);
/* Hashes of the lines for groups of n_ranks ranks: on one host, with one rank on each host, on other hosts. A rank
 * publishes them before it knows the hosts of its group. The order of the lines does not count, nor `ratio`, which changes
 * no choice. */
#define SP_PROFILE_HASHES 3
void sp_profile_hash(const sp_profile *p, int n_ranks, uint64_t hashes[SP_PROFILE_HASHES]);
/* Which of them counts for a group. */
static inline int sp_profile_hash_at(int n_hosts, int n_ranks)
{
    return n_hosts == 1 ? 0 : n_hosts == n_ranks ? 1 : 2;
}
/* Replace the line of the same kind, or add one. */
void sp_profile_put(sp_profile *p, const sp_profile_line *line);

#endif
