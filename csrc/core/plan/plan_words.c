/* plan_words.c - see plan_words.h. */
#include "core/plan/plan_words.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

spccl_status sp_word_bad(int line, const char *fmt, ...)
{
    char text[300];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return SP_FAIL(SPCCL_ERR_SETTING, "plan file, line %d: %s", line, text);
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

bool sp_word_next(sp_plan_reader *r, sp_word *w)
{
    while (r->at < r->end && is_blank(*r->at))
        r->at++;
    w->p = r->at;
    if (r->at == r->end || *r->at == '\n' || *r->at == '#')
        return false;
    while (r->at < r->end && !is_blank(*r->at) && *r->at != '\n')
        r->at++;
    w->n = (size_t)(r->at - w->p);
    return true;
}

bool sp_word_line(sp_plan_reader *r, sp_word *w)
{
    while (r->at < r->end) {
        if (sp_word_next(r, w))
            return true;
        sp_word_skip_line(r);
        if (r->at < r->end) {
            r->at++;
            r->line++;
        }
    }
    return false;
}

void sp_word_skip_line(sp_plan_reader *r)
{
    const char *end = memchr(r->at, '\n', (size_t)(r->end - r->at));
    r->at = end != NULL ? end : r->end;
}

spccl_status sp_word_end(sp_plan_reader *r)
{
    sp_word w;
    return sp_word_next(r, &w) ? sp_word_bad(r->line, "\"%.*s\" is not expected here", SP_WORD_SHOWN(w))
                               : SPCCL_OK;
}

bool sp_word_is(const sp_word *w, const char *text)
{
    return w->n == strlen(text) && memcmp(w->p, text, w->n) == 0;
}

bool sp_word_key(const sp_word *w, const char *key, sp_word *value)
{
    size_t n = strlen(key);
    if (w->n <= n || memcmp(w->p, key, n) != 0 || w->p[n] != '=')
        return false;
    *value = (sp_word){w->p + n + 1, w->n - n - 1};
    return true;
}

bool sp_word_number(sp_word *w, int min, int max, int *out)
{
    long n = 0;
    size_t i = 0;
    for (; i < w->n && w->p[i] >= '0' && w->p[i] <= '9'; i++)
        if ((n = n * 10 + (w->p[i] - '0')) > max)
            return false;
    if (i == 0 || n < min)
        return false;
    *out = (int)n;
    *w = (sp_word){w->p + i, w->n - i};
    return true;
}

spccl_status sp_word_value(const sp_plan_reader *r, sp_word value, const char *what, int min, int max,
                           int *out)
{
    sp_word left = value;
    if (!sp_word_number(&left, min, max, out) || left.n != 0)
        return sp_word_bad(r->line, "%s=%.*s: wanted %d to %d", what, SP_WORD_SHOWN(value), min, max);
    return SPCCL_OK;
}
