/* arithmetic.cpp - the sparse all-reduce's integer sum and average, against a model in 128 bits.
 *
 * Built with the undefined-behaviour sanitizer, which ends the program at a signed overflow or a division by
 * zero. Exit code 0: all equal. */
#include "arithmetic.hpp"

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <limits>

namespace
{
using spccl_torch::average_of;
using spccl_torch::sum_of;
int n_wrong = 0;

/* The value that the low bits of `x` are in T. */
template <class T> T wrapped(__int128 x)
{
    const __int128 n = static_cast<__int128>(1) << (8 * sizeof(T));
    __int128 low = ((x % n) + n) % n;
    if (low > static_cast<__int128>(std::numeric_limits<T>::max()))
        low -= n;
    return static_cast<T>(low);
}

template <class T> void check(const char *name, T value, int n_ranks)
{
    T sum = 0;
    __int128 model = 0;
    for (int r = 0; r < n_ranks; r++) {
        sum = sum_of<T>(sum, value);
        model += value;
    }
    const T want_sum = wrapped<T>(model);
    const T want = static_cast<T>(static_cast<__int128>(want_sum) / n_ranks);
    if (sum == want_sum && average_of<T>(sum, n_ranks) == want)
        return;
    n_wrong++;
    std::printf("%s: %d ranks of %lld: sum %lld wanted %lld, average %lld wanted %lld\n", name, n_ranks,
                static_cast<long long>(value), static_cast<long long>(sum), static_cast<long long>(want_sum),
                static_cast<long long>(average_of<T>(sum, n_ranks)), static_cast<long long>(want));
}

template <class T> void check_type(const char *name)
{
    const T lowest = std::numeric_limits<T>::lowest(), highest = std::numeric_limits<T>::max();
    for (int n_ranks : {1, 2, 3, 127, 128, 129, 200, 255, 256, 257, 512, 1000, 70000})
        for (T value : {static_cast<T>(0), static_cast<T>(1), static_cast<T>(-1), static_cast<T>(77), lowest,
                        static_cast<T>(lowest + 1), highest, static_cast<T>(highest - 1)})
            check(name, value, n_ranks);
}
} // namespace

int main()
{
    check_type<int8_t>("int8");
    check_type<uint8_t>("uint8");
    check_type<int16_t>("int16");
    check_type<int32_t>("int32");
    check_type<int64_t>("int64");
    if (average_of(3.0f, 256) != 3.0f / 256 || sum_of(1.5, 2.25) != 3.75)
        n_wrong++;
    return n_wrong == 0 ? 0 : 1;
}
