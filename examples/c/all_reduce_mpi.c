/* all_reduce_mpi.c - the ranks of an MPI job add sparse arrays with spccl, on one host or several.
 *
 *   mpicc -o all_reduce_mpi all_reduce_mpi.c $(pkg-config --cflags --libs spccl)
 *   mpirun -n 2 ./all_reduce_mpi
 *
 * MPI starts the processes, numbers them, and carries the unique id from rank 0 to the others. */
#include <mpi.h>
#include <spccl.h>

#include <stdio.h>
#include <stdlib.h>

#define N_ELEMS ((size_t)4 << 20) /* 16 MiB of float32 */

static void check(spccl_status st, int rank, const char *what)
{
    if (st == SPCCL_OK)
        return;
    fprintf(stderr, "rank %d: %s: %s: %s\n", rank, what, spccl_status_name(st), spccl_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Rank r has one value in 100, beginning at element r. So each sum is the number of one rank, plus 1. */
static size_t n_wrong_of(const float *x, int n_ranks)
{
    size_t n_wrong = 0;
    for (size_t i = 0; i < N_ELEMS; i++)
        n_wrong += x[i] != (i % 100 < (size_t)n_ranks ? (float)(i % 100 + 1) : 0.0f);
    return n_wrong;
}

int main(int argc, char **argv)
{
    spccl_config config = SPCCL_CONFIG_INIT;
    spccl_comm *comm = NULL;
    spccl_unique_id id;
    const char *link = "";
    float *x = calloc(N_ELEMS, sizeof *x);
    size_t n_wrong;
    int rank, n_ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n_ranks);
    if (x == NULL || n_ranks > 100)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (size_t i = (size_t)rank; i < N_ELEMS; i += 100)
        x[i] = (float)(rank + 1);

    if (rank == 0)
        check(spccl_get_unique_id(&id), rank, "unique id");
    MPI_Bcast(id.bytes, sizeof id.bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
    config.timeout_ms = 60000;
    check(spccl_comm_init_rank(&id, rank, n_ranks, &config, &comm), rank, "init");
    check(spccl_all_reduce(comm, x, x, N_ELEMS, SPCCL_FLOAT32, SPCCL_SUM, NULL), rank, "all_reduce");

    n_wrong = n_wrong_of(x, n_ranks);
    check(spccl_comm_describe_link(comm, (rank + 1) % n_ranks, &link), rank, "describe_link");
    printf("rank %d of %d: %zu wrong of %zu; to rank %d: %s\n", rank, n_ranks, n_wrong, N_ELEMS,
           (rank + 1) % n_ranks, link);
    check(spccl_comm_destroy(comm), rank, "destroy");
    free(x);
    MPI_Finalize();
    return n_wrong != 0;
}
