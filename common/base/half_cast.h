// Conversions of whole arrays between the 16-bit floating types and float or double.
#ifndef BAGUA_COMMON_BASE_HALF_CAST_H_
#define BAGUA_COMMON_BASE_HALF_CAST_H_

#include <cstddef>

#include "common/base/half.h"

namespace bagua {

// dst[i] = src[i] for i < count, with the bits that half.h's scalar functions give, on any
// processor. From double the value is rounded once, to nearest even, not by way of float. The
// arrays must not overlap; they need no alignment. Thread-safety: any thread.
void Convert(const Half* src, size_t count, float* dst);
void Convert(const Bfloat16* src, size_t count, float* dst);
void Convert(const Half* src, size_t count, double* dst);
void Convert(const Bfloat16* src, size_t count, double* dst);
void Convert(const float* src, size_t count, Half* dst);
void Convert(const float* src, size_t count, Bfloat16* dst);
void Convert(const double* src, size_t count, Half* dst);
void Convert(const double* src, size_t count, Bfloat16* dst);

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_HALF_CAST_H_
