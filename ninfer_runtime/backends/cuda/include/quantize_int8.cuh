// Activations as signed bytes, a scale per 64 columns. Oracle: ninfer_format/numeric/int8_activations.py, equal words.
//
// Row of K columns, K padded to 128 with zeros: K bytes of codes, then for every 64 columns fp32 scale and int32 sum of the
// codes. Of 64 columns the 16-byte chunk t has lane t's of a quad: columns 8t .. + 7, then 32 + 8t .. + 7, each eight in the
// order 0 4 1 5 2 6 3 7, in which packed weights give up their codes (linear_int8.cu).
#pragma once

#include "common.cuh"

// Four columns per lane, 128 per warp: 4 lane .. + 3 of the step that starts at `step`. All lanes take part.
DEVICE void quantize_step_int8(const float (&x)[4], int step, unsigned char* row, int extras_at) {
    const int lane = static_cast<int>(lane_id());
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = maximum(largest, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
    for (int mask = 1; mask < 16; mask <<= 1) largest = maximum(largest, shfl_xor(largest, mask));
    const float amax = __uint_as_float(largest);
    const float inverse = largest == 0 ? 0.0f : 127.0f / amax;
    int sum = 0;
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int code = float_to_int_rn(x[i] * inverse);
        sum += code;
        own |= (static_cast<uint32_t>(code) & 0xffu) << 8 * i;
    }
#pragma unroll
    for (int mask = 1; mask < 16; mask <<= 1) sum += shfl_xor(sum, mask);
    const uint32_t other = shfl_xor(own, 1);
    const uint32_t word = lane & 1 ? prmt(other, own, 0x7362u) : prmt(own, other, 0x5140u);
    const int at = lane / 16 * 64 + lane % 8 / 2 * 16 + lane % 16 / 8 * 8 + lane % 2 * 4;
    store_4(row + step + at, word);
    if (lane % 16 == 0)
        store_8(row + extras_at + (step / 64 + lane / 16) * 8,
                uint2{__float_as_uint(amax / 127.0f), static_cast<uint32_t>(sum)});
}
