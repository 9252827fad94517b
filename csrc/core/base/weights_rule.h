/* weights_rule.h - what sending and receiving do with one weight (spccl_weights_send,
 * spccl_weights_receive). The host and the GPU give the same bits for given thresholds.
 *
 * Symbols: w a rank's own weight, z the shared one, t threshold, l leak. Sending is
 *     d = w - z;   send s = d unless |d| < t, else s = 0;   w = z where d was sent, else l d + z
 * so that w - z is what is still to be sent. With l = 1 a weight that is not sent stays as it is. A d that is
 * not finite is dropped: s = 0 and w = z. The caller's scale multiplies s; an s that becomes 0 by that counts
 * as sent. Receiving c is
 *     z = z + c;   w = w + c   where c is not 0
 * so that w = z stays true bit for bit where it was. */
#ifndef SP_WEIGHTS_RULE_H
#define SP_WEIGHTS_RULE_H

#include "core/base/prune_rule.h"
#include "spccl_experimental.h"

/* Whether a segment is sent whole. */
static inline SP_HD bool sp_weights_whole(const spccl_weights_options *o, const spccl_weights_segment *s)
{
    return s->whole != 0 || (float)o->density >= 1.0f;
}

/* sp_weights_elem_NAME: one element. `sent` counts zeros too where the segment is sent whole, as pruning
 * does. */
#define SP_WEIGHTS_ELEM(NAME, TYPE, IS_FINITE, ABS)                                                          \
    typedef struct sp_weights_##NAME {                                                                       \
        TYPE s, w;                                                                                           \
        bool sent, finite;                                                                                   \
    } sp_weights_##NAME;                                                                                     \
    static inline SP_HD sp_weights_##NAME sp_weights_elem_##NAME(TYPE w, TYPE z, TYPE threshold, TYPE leak,  \
                                                                 bool whole)                                 \
    {                                                                                                        \
        sp_weights_##NAME e;                                                                                 \
        TYPE d = w - z;                                                                                      \
        e.finite = IS_FINITE(d);                                                                             \
        d = e.finite ? d : 0;                                                                                \
        e.sent = whole || (!(ABS(d) < threshold) && d != 0);                                                 \
        e.s = e.sent ? d : 0;                                                                                \
        e.w = !e.finite || (e.sent && d != 0) ? z : leak != 1 && d != 0 ? leak * d + z : w;                  \
        return e;                                                                                            \
    }
SP_WEIGHTS_ELEM(f32, float, sp_f32_is_finite, fabsf)
SP_WEIGHTS_ELEM(f64, double, sp_f64_is_finite, fabs)

#endif
