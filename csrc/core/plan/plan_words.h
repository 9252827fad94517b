/* plan_words.h - lines and words of the text of a plan file, with bounds. Private to plan_text.c. */
#ifndef SP_PLAN_WORDS_H
#define SP_PLAN_WORDS_H

#include "core/plan/plan_text.h"

typedef struct sp_word {
    const char *p; /* in the text; no zero at its end */
    size_t n;
} sp_word;

/* Two arguments for "%.*s": at most this much of a word goes into a text. */
#define SP_WORD_SHOWN(w) (int)((w).n < 24 ? (w).n : 24), (w).p

/* Fail with SETTING: "plan file, line 3: ..." */
spccl_status sp_word_bad(int line, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The next word of the line. False at its end, or at a comment. */
bool sp_word_next(sp_plan_reader *r, sp_word *w);
/* Go to the next line that has a word, and take that word. False at the end of the text. */
bool sp_word_line(sp_plan_reader *r, sp_word *w);
/* Go to the end of the line. */
void sp_word_skip_line(sp_plan_reader *r);
/* Refuse what is left of a line. */
spccl_status sp_word_end(sp_plan_reader *r);
bool sp_word_is(const sp_word *w, const char *text);
/* If the word is KEY=VALUE, *value gets the second part. */
bool sp_word_key(const sp_word *w, const char *key, sp_word *value);
/* A number from min to max at the start of the word, which gets shorter by it. */
bool sp_word_number(sp_word *w, int min, int max, int *out);
/* The value is one such number. `what`: the key, for the text. */
spccl_status sp_word_value(const sp_plan_reader *r, sp_word value, const char *what, int min, int max,
                           int *out);

#endif
