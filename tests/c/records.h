/* records.h - a file of test data (*.hex): in each line a name, a space and bytes in hex. */
#ifndef SP_TEST_RECORDS_H
#define SP_TEST_RECORDS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct record {
    char *name;
    uint8_t *p; /* memory of exactly `bytes`: sanitizers find any read past its end */
    size_t bytes;
};

/* Call fn on each record of a file. Returns their number; 0 if the file cannot be read or a line is wrong. */
static inline size_t each_record(const char *path, void (*fn)(const struct record *r))
{
    FILE *f = fopen(path, "r");
    char *line = NULL;
    size_t cap = 0, n = 0;
    long length;

    while (f != NULL && (length = getline(&line, &cap, f)) > 0) {
        char *hex = strchr(line, ' ');
        struct record r = {line, NULL, hex != NULL ? strspn(hex + 1, "0123456789abcdef") / 2 : 0};
        if (hex == NULL || hex + 1 + 2 * r.bytes + 1 != line + length) {
            fprintf(stderr, "%s: line %zu is not: name, space, bytes in hex\n", path, n + 1);
            n = 0;
            break;
        }
        *hex = '\0';
        r.p = malloc(r.bytes != 0 ? r.bytes : 1);
        for (size_t i = 0; i < r.bytes; i++)
            sscanf(hex + 1 + 2 * i, "%2hhx", &r.p[i]);
        fn(&r);
        free(r.p);
        n++;
    }
    free(line);
    if (f != NULL)
        fclose(f);
    return n;
}

#endif
