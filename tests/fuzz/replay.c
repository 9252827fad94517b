/* replay.c - a main for the fuzz targets, without libFuzzer: passes the named files, and the files of the
 * named folders, to the target. With it the normal tests of any compiler run the committed corpus. */
#include "fuzz.h"

#include <dirent.h>
#include <sys/stat.h>

static size_t n_fed;

static int feed_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    uint8_t *p;
    long end;

    if (f == NULL || fseek(f, 0, SEEK_END) != 0 || (end = ftell(f)) < 0) {
        fprintf(stderr, "cannot read %s\n", path);
        if (f != NULL)
            fclose(f);
        return 1;
    }
    rewind(f);
    p = malloc(end > 0 ? (size_t)end : 1); /* exactly its size: sanitizers find any read past its end */
    if (p == NULL || fread(p, 1, (size_t)end, f) != (size_t)end) {
        fprintf(stderr, "cannot read %s\n", path);
        fclose(f);
        free(p);
        return 1;
    }
    fclose(f);
    LLVMFuzzerTestOneInput(p, (size_t)end);
    free(p);
    n_fed++;
    return 0;
}

static int feed_folder(const char *path)
{
    DIR *d = opendir(path);
    struct dirent *e;
    int failed = d == NULL;

    if (d == NULL)
        fprintf(stderr, "cannot open %s\n", path);
    while (d != NULL && (e = readdir(d)) != NULL) {
        char file[4096];
        if (e->d_name[0] == '.')
            continue;
        snprintf(file, sizeof file, "%s/%s", path, e->d_name);
        failed |= feed_file(file);
    }
    if (d != NULL)
        closedir(d);
    return failed;
}

int main(int argc, char **argv)
{
    int failed = 0;

    for (int i = 1; i < argc; i++) {
        struct stat s;
        int is_folder = stat(argv[i], &s) == 0 && S_ISDIR(s.st_mode);
        failed |= is_folder ? feed_folder(argv[i]) : feed_file(argv[i]);
    }
    printf("%zu inputs\n", n_fed);
    if (n_fed == 0)
        fprintf(stderr, "no inputs: wanted files or folders as arguments\n");
    return failed || n_fed == 0;
}
