/* all_reduce.c - two processes add two sparse arrays with libspccl's C interface.
 *
 *   cc -o all_reduce all_reduce.c $(pkg-config --cflags --libs spccl) && ./all_reduce
 *
 * The first process makes the unique id and gives its 128 bytes to the second. This example uses a pipe; a
 * file, MPI_Bcast or a job script would also do. Then both join the group and call the same collective. */
#include <spccl.h>

#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_ELEMS ((size_t)16 << 20) /* 64 MiB of float32 */
#define WORLD_SIZE 2

static void check(spccl_status st, int rank, const char *what)
{
    if (st == SPCCL_OK)
        return;
    fprintf(stderr, "rank %d: %s: %s: %s\n", rank, what, spccl_status_name(st), spccl_last_error());
    exit(1);
}

static int run(int rank, const spccl_unique_id *id)
{
    spccl_config config = SPCCL_CONFIG_INIT;
    spccl_stats stats = {.struct_bytes = sizeof stats};
    spccl_comm *comm = NULL;
    float *x = calloc(N_ELEMS, sizeof *x);
    size_t n_wrong = 0;
    if (x == NULL)
        return 1;
    for (size_t i = (size_t)rank * 7; i < N_ELEMS; i += 100) /* 99% zeros; the nonzeros differ by rank */
        x[i] = (float)(rank + 1);

    config.timeout_ms = 30000;
    check(spccl_comm_init_rank(id, rank, WORLD_SIZE, &config, &comm), rank, "init");
    check(spccl_all_reduce(comm, x, x, N_ELEMS, SPCCL_FLOAT32, SPCCL_SUM, NULL), rank, "all_reduce");
    for (size_t i = 0; i < N_ELEMS; i++)
        n_wrong += x[i] != (float)((i % 100 == 0 ? 1 : 0) + (i % 100 == 7 ? 2 : 0));

    check(spccl_comm_stats(comm, &stats), rank, "stats");
    printf("rank %d: %zu wrong of %zu; sent %.2f MB where dense data is %.2f MB (%.0fx less)\n", rank,
           n_wrong, N_ELEMS, (double)stats.wire_bytes_sent * 1e-6, (double)stats.dense_bytes_sent * 1e-6,
           (double)stats.dense_bytes_sent / (double)stats.wire_bytes_sent);
    check(spccl_comm_destroy(comm), rank, "destroy");
    free(x);
    return n_wrong != 0;
}

int main(void)
{
    spccl_unique_id id;
    int ends[2], child_status = 0, rc;
    pid_t child;
    if (pipe(ends) != 0 || (child = fork()) < 0) {
        perror("pipe or fork");
        return 1;
    }
    if (child == 0) {
        if (read(ends[0], id.bytes, sizeof id.bytes) != (ssize_t)sizeof id.bytes)
            return 1;
        return run(1, &id);
    }
    check(spccl_get_unique_id(&id), 0, "unique id");
    if (write(ends[1], id.bytes, sizeof id.bytes) != (ssize_t)sizeof id.bytes)
        return 1;
    rc = run(0, &id);
    if (waitpid(child, &child_status, 0) != child)
        return 1;
    return rc != 0 || child_status != 0;
}
