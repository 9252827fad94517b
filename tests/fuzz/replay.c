/* replay.c - a main for the fuzz targets, without libFuzzer: passes the records of the named files to the target. With
 * it the normal tests of any compiler run the committed corpus. */
#include "c/records.h"
#include "fuzz.h"

static void feed(const struct record *r)
{
    LLVMFuzzerTestOneInput(r->p, r->bytes);
}

int main(int argc, char **argv)
{
    int failed = argc < 2;

    for (int i = 1; i < argc; i++) {
        size_t n = each_record(argv[i], feed);
        printf("%s: %zu inputs\n", argv[i], n);
        failed |= n == 0;
    }
    return failed;
}
