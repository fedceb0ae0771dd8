// Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"), one uniform number per draw.
// Reference: backends/reference/sampling.py `uniform`, bit for bit.
#pragma once

// What a random number is for; every purpose has its own stream.
constexpr uint64_t PURPOSE_TARGET = 0;
constexpr uint64_t PURPOSE_ACCEPT = 1;
constexpr uint64_t PURPOSE_CORRECTION = 2;
constexpr uint64_t PURPOSE_BONUS = 3;
constexpr uint64_t PURPOSE_DRAFT = 4;
constexpr uint64_t PURPOSE_FORCED = 0xffffffffull;  // measurements only

// In [0, 1): the upper 53 bits of the first word for key (seed, purpose) and counter (position + 1, 0, 0, 0).
DEVICE double philox_uniform(uint64_t seed, uint64_t position, uint64_t purpose) {
    uint64_t c0 = position + 1, c1 = 0, c2 = 0, c3 = 0;
    uint64_t k0 = seed, k1 = purpose;
    for (int round = 0; round < 10; ++round) {
        const uint64_t m0 = 0xd2e7470ee14c6c93ull, m1 = 0xca5a826395121157ull;
        const uint64_t hi0 = __umul64hi(m0, c0), lo0 = m0 * c0;
        const uint64_t hi1 = __umul64hi(m1, c2), lo1 = m1 * c2;
        c0 = hi1 ^ c1 ^ k0;
        c1 = lo1;
        c2 = hi0 ^ c3 ^ k1;
        c3 = lo0;
        k0 += 0x9e3779b97f4a7c15ull;
        k1 += 0xbb67ae8584caa73bull;
    }
    return static_cast<double>(c0 >> 11) * 0x1.0p-53;
}
