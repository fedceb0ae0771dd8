// A step of 128 columns of a row in any form. All lanes of a warp take part, four columns each.
#pragma once

#include "quantize_fp4.cuh"
#include "quantize_int8.cuh"

// row: the row's first byte; k_padded: its columns; divisor: of the site, which bytes have none of.
template <int AS>
DEVICE void quantize_row_step(const float (&x)[4], float divisor, int step, unsigned char* row, int k_padded) {
    if constexpr (AS == AS_INT8)
        quantize_step_int8(x, step, row, k_padded);
    else
        quantize_step<AS>(x, divisor, step, row, fp4_code_bytes(k_padded));
}
