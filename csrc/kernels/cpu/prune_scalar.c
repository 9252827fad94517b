/* prune_scalar.c - pruning, one element at a time: defines the bits that the vector versions give. */
#include "kernels/cpu/elem.h"
#include "kernels/cpu/kernels.h"

static float same_f32(float v)
{
    return v;
}
static double same_f64(double v)
{
    return v;
}
/* The bits of a gradient that is sent as it is. */
static uint16_t same_u16(uint16_t v)
{
    return v;
}

static float get_residual_f32(const sp_prune_args *a, size_t i)
{
    return a->residual_bf16 ? sp_bf16_to_f32(sp_get_u16(a->residual, i)) : sp_get_f32(a->residual, i);
}
static void put_residual_f32(const sp_prune_args *a, size_t i, float v)
{
    if (a->residual_bf16)
        sp_put_u16(a->residual, i, sp_bf16_round_randomly(v, sp_prune_random_bits(a->random, a->first + i)));
    else
        sp_put_f32(a->residual, i, v);
}
static double get_residual_f64(const sp_prune_args *a, size_t i)
{
    return sp_get_f64(a->residual, i);
}
static void put_residual_f64(const sp_prune_args *a, size_t i, double v)
{
    sp_put_f64(a->residual, i, v);
}

/* NAME of the dtypes; how the gradient is loaded (sp_get_); NAME of the state; the gradient's dtype -> value; where and
 * how what is sent is stored (sp_put_); value -> dtype of what is sent, and back; a gradient as it is -> that dtype. */
#define PRUNE(NAME, ACCESS, STATE, TYPE, FROM, SENT, PUT, NARROW, WIDEN, AS_IS)                              \
    static sp_prune_##STATE elem_##NAME(const sp_prune_args *a, size_t i, const sp_prune_factors_##STATE *f) \
    {                                                                                                        \
        return sp_prune_elem_##STATE(FROM(sp_get_##ACCESS(a->grad, i)),                                      \
                                     a->residual != NULL ? get_residual_##STATE(a, i) : 0,                   \
                                     a->velocity != NULL ? sp_get_##STATE(a->velocity, i) : 0,               \
                                     a->residual != NULL, a->velocity != NULL, f);                           \
    }                                                                                                        \
    static void rescale_##NAME(const sp_prune_args *a, size_t i, const sp_prune_factors_##STATE *f)          \
    {                                                                                                        \
        if (a->residual != NULL)                                                                             \
            put_residual_##STATE(a, i, sp_prune_rescaled_##STATE(get_residual_##STATE(a, i), f));            \
        if (a->velocity != NULL)                                                                             \
            sp_put_##STATE(a->velocity, i, sp_prune_rescaled_##STATE(sp_get_##STATE(a->velocity, i), f));    \
    }                                                                                                        \
    static void prune_##NAME(sp_prune_args *a)                                                               \
    {                                                                                                        \
        sp_prune_factors_##STATE f = sp_prune_factors_of_##STATE(a->factors);                                \
        while (a->n_done < a->n) {                                                                           \
            size_t end = sp_min_size(a->n_done + SP_PRUNE_RUN, a->n);                                        \
            uint64_t n_sent = 0, n_nonfinite = 0;                                                            \
            for (size_t i = a->n_done; i < end; i++) {                                                       \
                sp_prune_##STATE e = elem_##NAME(a, i, &f);                                                  \
                n_sent += e.sent || !e.finite;                                                               \
                n_nonfinite += !e.finite;                                                                    \
            }                                                                                                \
            if (!sp_prune_goes_on(a, n_sent, n_nonfinite))                                                   \
                return;                                                                                      \
            for (size_t i = a->n_done; i < end; i++) {                                                       \
                sp_prune_##STATE e = elem_##NAME(a, i, &f);                                                  \
                TYPE s = e.sent ? WIDEN(NARROW(e.v)) : 0;                                                    \
                if (!e.finite) {                                                                             \
                    sp_put_##PUT(a->SENT, i, AS_IS(sp_get_##ACCESS(a->grad, i)));                            \
                    rescale_##NAME(a, i, &f);                                                                \
                    continue;                                                                                \
                }                                                                                            \
                sp_put_##PUT(a->SENT, i, NARROW(f.scale == 1 ? s : s * f.scale));                            \
                if (a->residual != NULL)                                                                     \
                    put_residual_##STATE(a, i, e.v - s);                                                     \
                if (a->velocity != NULL)                                                                     \
                    sp_put_##STATE(a->velocity, i, e.u);                                                     \
            }                                                                                                \
            a->n_done = end;                                                                                 \
        }                                                                                                    \
    }
PRUNE(float32, f32, f32, float, same_f32, grad, f32, same_f32, same_f32, same_f32)
PRUNE(float64, f64, f64, double, same_f64, grad, f64, same_f64, same_f64, same_f64)
PRUNE(float16, u16, f32, float, sp_f16_to_f32, grad, u16, sp_prune_to_f16, sp_f16_to_f32, same_u16)
PRUNE(bfloat16, u16, f32, float, sp_bf16_to_f32, grad, u16, sp_prune_to_bf16, sp_bf16_to_f32, same_u16)
PRUNE(to_float16, f32, f32, float, same_f32, sent, u16, sp_prune_to_f16, sp_f16_to_f32, sp_prune_as_is_f16)
PRUNE(to_bfloat16, f32, f32, float, same_f32, sent, u16, sp_prune_to_bf16, sp_bf16_to_f32,
      sp_prune_as_is_bf16)

void sp_prune_scalar(sp_prune_args *a)
{
    a->n_sent = a->n_nonfinite = 0;
    a->n_done = 0;
    if (a->sent != NULL && a->sent_dtype == SPCCL_FLOAT16)
        prune_to_float16(a);
    else if (a->sent != NULL)
        prune_to_bfloat16(a);
    else if (a->dtype == SPCCL_FLOAT32)
        prune_float32(a);
    else if (a->dtype == SPCCL_FLOAT64)
        prune_float64(a);
    else if (a->dtype == SPCCL_FLOAT16)
        prune_float16(a);
    else
        prune_bfloat16(a);
}
