/* arithmetic.hpp - sum and average of single elements, for the sparse all-reduce on the host.
 *
 * Integers follow the dense reductions of libspccl (reduce_scalar.c) bit for bit: a sum wraps at the width of
 * its dtype, and an average divides the wrapped sum by the number of ranks, toward zero. May include: nothing
 * of ours. */
#pragma once

#include <type_traits>

namespace spccl_torch
{

/* a + b. Integers wrap: the addition is unsigned, because a signed overflow is undefined. */
template <class T> T sum_of(T a, T b)
{
    if constexpr (std::is_integral_v<T>) {
        using U = std::make_unsigned_t<T>;
        return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else {
        return a + b;
    }
}

/* sum / n_ranks. Integers narrower than int are divided as int: 200 ranks do not fit into an int8. */
template <class T> T average_of(T sum, int n_ranks)
{
    if constexpr (std::is_integral_v<T>)
        return static_cast<T>(sum / static_cast<std::common_type_t<T, int>>(n_ranks));
    else
        return sum / static_cast<T>(n_ranks);
}

} // namespace spccl_torch
