#include "common/base/half_cast.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/base/isa.h"

namespace bagua {
namespace {

// A kernel converts the first values, a multiple of its width, and returns how many; the rest is
// left to the scalar code.
using Kernel = size_t (*)(const char* src, size_t count, char* dst);

size_t LeaveAll(const char*, size_t, char*) {
  return 0;
}

inline float Narrow(Half v) {
  return ToFloat(v);
}
inline float Narrow(Bfloat16 v) {
  return ToFloat(v);
}
inline void Assign(float v, float* dst) {
  *dst = v;
}
inline void Assign(float v, Half* dst) {
  *dst = ToHalf(v);
}
inline void Assign(float v, Bfloat16* dst) {
  *dst = ToBfloat16(v);
}
inline float Narrow(float v) {
  return v;
}

template <class From, class To>
void ConvertScalars(const char* src, size_t count, char* dst) {
  for (size_t i = 0; i < count; ++i) {
    From value;
    To result;
    std::memcpy(&value, src + i * sizeof(From), sizeof(From));
    Assign(Narrow(value), &result);
    std::memcpy(dst + i * sizeof(To), &result, sizeof(To));
  }
}

#if defined(__x86_64__)
#define BAGUA_AVX2 __attribute__((target("avx2,f16c")))
#define BAGUA_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

// The hardware quiets a signalling NaN where the scalar code keeps it, so NaNs go the scalar way.
BAGUA_AVX2 size_t HalfToFloatAvx2(const char* src, size_t count, char* dst) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + 2 * i));
    const __m256 value = _mm256_cvtph_ps(bits);
    if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(value, value, _CMP_UNORD_Q)) != 0, 0))
      ConvertScalars<Half, float>(src + 2 * i, 8, dst + 4 * i);
    else
      _mm256_storeu_ps(reinterpret_cast<float*>(dst + 4 * i), value);
  }
  return i;
}

BAGUA_AVX2 size_t FloatToHalfAvx2(const char* src, size_t count, char* dst) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 value = _mm256_loadu_ps(reinterpret_cast<const float*>(src + 4 * i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + 2 * i),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  return i;
}

BAGUA_AVX2 size_t BfloatToFloatAvx2(const char* src, size_t count, char* dst) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + 2 * i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 4 * i),
                        _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  return i;
}

// The bits of bfloat16 in the low halves; see ToBfloat16.
BAGUA_AVX2 inline __m256i RoundToBfloat(__m256i bits) {
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}

BAGUA_AVX2 size_t FloatToBfloatAvx2(const char* src, size_t count, char* dst) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const auto* from = reinterpret_cast<const __m256i*>(src + 4 * i);
    const __m256i packed = _mm256_packus_epi32(RoundToBfloat(_mm256_loadu_si256(from)),
                                               RoundToBfloat(_mm256_loadu_si256(from + 1)));
    // packus works within each 128-bit lane.
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 2 * i),
                        _mm256_permute4x64_epi64(packed, 0b11011000));
  }
  return i;
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
// GCC before 13 takes the undefined operands inside its own AVX-512 intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
BAGUA_AVX512 size_t HalfToFloatAvx512(const char* src, size_t count, char* dst) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 2 * i));
    const __m512 value = _mm512_cvtph_ps(bits);
    if (__builtin_expect(_mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q) != 0, 0))
      ConvertScalars<Half, float>(src + 2 * i, 16, dst + 4 * i);
    else
      _mm512_storeu_ps(dst + 4 * i, value);
  }
  return i;
}

BAGUA_AVX512 size_t FloatToHalfAvx512(const char* src, size_t count, char* dst) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 2 * i),
                        _mm512_cvtps_ph(_mm512_loadu_ps(src + 4 * i),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return i;
}

BAGUA_AVX512 size_t BfloatToFloatAvx512(const char* src, size_t count, char* dst) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 2 * i));
    _mm512_storeu_si512(dst + 4 * i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  return i;
}

BAGUA_AVX512 size_t FloatToBfloatAvx512(const char* src, size_t count, char* dst) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512i bits = _mm512_loadu_si512(src + 4 * i);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    const __m512i result = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 2 * i), _mm512_cvtepi32_epi16(result));
  }
  return i;
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

constexpr Kernel kHalfToFloat[kIsaCount] = {LeaveAll, HalfToFloatAvx2, HalfToFloatAvx512};
constexpr Kernel kFloatToHalf[kIsaCount] = {LeaveAll, FloatToHalfAvx2, FloatToHalfAvx512};
constexpr Kernel kBfloatToFloat[kIsaCount] = {LeaveAll, BfloatToFloatAvx2, BfloatToFloatAvx512};
constexpr Kernel kFloatToBfloat[kIsaCount] = {LeaveAll, FloatToBfloatAvx2, FloatToBfloatAvx512};
#else
constexpr Kernel kHalfToFloat[kIsaCount] = {LeaveAll, LeaveAll, LeaveAll};
constexpr Kernel kFloatToHalf[kIsaCount] = {LeaveAll, LeaveAll, LeaveAll};
constexpr Kernel kBfloatToFloat[kIsaCount] = {LeaveAll, LeaveAll, LeaveAll};
constexpr Kernel kFloatToBfloat[kIsaCount] = {LeaveAll, LeaveAll, LeaveAll};
#endif

template <class From, class To>
void Run(const Kernel (&kernels)[kIsaCount], const From* from, size_t count, To* to) {
  const char* src = reinterpret_cast<const char*>(from);
  char* dst = reinterpret_cast<char*>(to);
  const size_t done = kernels[static_cast<int>(ActiveIsa())](src, count, dst);
  ConvertScalars<From, To>(src + done * sizeof(From), count - done, dst + done * sizeof(To));
}

// Rounded to odd: a float that any narrower type rounds to as it would have rounded `v` itself.
inline float NarrowToOdd(double v) {
  const float nearest = static_cast<float>(v);
  const double back = nearest;
  if (back == v || std::isnan(v)) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (std::fabs(back) > std::fabs(v)) --bits;
  return std::bit_cast<float>(bits | 1u);
}

constexpr size_t kBlock = 512;

template <class To>
void ConvertDoubles(const double* from, size_t count, To* to) {
  const char* src = reinterpret_cast<const char*>(from);
  float block[kBlock];
  for (size_t done = 0; done < count; done += kBlock) {
    const size_t here = std::min(kBlock, count - done);
    for (size_t i = 0; i < here; ++i) {
      double value;
      std::memcpy(&value, src + (done + i) * sizeof(double), sizeof(double));
      block[i] = NarrowToOdd(value);
    }
    Convert(block, here, to + done);
  }
}

template <class From>
void ConvertToDoubles(const From* from, size_t count, double* to) {
  char* dst = reinterpret_cast<char*>(to);
  float block[kBlock];
  for (size_t done = 0; done < count; done += kBlock) {
    const size_t here = std::min(kBlock, count - done);
    Convert(from + done, here, block);
    for (size_t i = 0; i < here; ++i) {
      const double value = block[i];
      std::memcpy(dst + (done + i) * sizeof(double), &value, sizeof(double));
    }
  }
}

}  // namespace

void Convert(const Half* src, size_t count, float* dst) {
  Run(kHalfToFloat, src, count, dst);
}
void Convert(const Bfloat16* src, size_t count, float* dst) {
  Run(kBfloatToFloat, src, count, dst);
}
void Convert(const float* src, size_t count, Half* dst) {
  Run(kFloatToHalf, src, count, dst);
}
void Convert(const float* src, size_t count, Bfloat16* dst) {
  Run(kFloatToBfloat, src, count, dst);
}
void Convert(const Half* src, size_t count, double* dst) {
  ConvertToDoubles(src, count, dst);
}
void Convert(const Bfloat16* src, size_t count, double* dst) {
  ConvertToDoubles(src, count, dst);
}
void Convert(const double* src, size_t count, Half* dst) {
  ConvertDoubles(src, count, dst);
}
void Convert(const double* src, size_t count, Bfloat16* dst) {
  ConvertDoubles(src, count, dst);
}

}  // namespace bagua
