/* profile_file.h - the file of SPCCL_SCHEDULE=tune:PATH: what the tuner has learnt (profile.h). A profile that cannot be
 * used is no error: one warning says why, and the group tunes without it. The library does not write over a file that it
 * could not use. */
#ifndef SP_PROFILE_FILE_H
#define SP_PROFILE_FILE_H

#include "core/run/comm.h"

typedef struct sp_profile_file sp_profile_file;

/* Read the file, if there is one. comm: rank, name and kernels are set. Errors: NOMEM, SETTING (the path is too long). */
spccl_status sp_profile_file_open(const spccl_comm *comm, const char *path, sp_profile_file **out);
void sp_profile_file_close(sp_profile_file *f); /* accepts NULL */
/* sp_profile_hash; 0: the group has no profile, or this rank cannot use it. f may be NULL. */
void sp_profile_file_hash(const sp_profile_file *f, int n_ranks, uint64_t hashes[SP_PROFILE_HASHES]);
/* When the ranks have met: what the group uses. NULL: nothing, also because ranks have other profiles. */
const sp_profile *sp_profile_file_use(spccl_comm *comm);
/* At the end of the group: the first rank of each host writes what was learnt. */
void sp_profile_file_save(spccl_comm *comm);
/* What spccl_info says of a path: how many lines, or why the profile is not used. text [cap]. */
void sp_profile_file_describe(const char *path, char *text, size_t cap);

#endif
