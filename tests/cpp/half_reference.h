// The 16-bit floating types by arithmetic on doubles alone, to compare the bit tricks with.
#ifndef BAGUA_TESTS_CPP_HALF_REFERENCE_H_
#define BAGUA_TESTS_CPP_HALF_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace bagua {

// A binary format of 16 bits: sign, exponent, `mantissa_bits`.
struct Format16 {
  int mantissa_bits;
  int max_exponent;  // of finite values; the smallest normal exponent is 1 - max_exponent
};
constexpr Format16 kHalfFormat = {10, 15};
constexpr Format16 kBfloat16Format = {7, 127};

inline double ReferenceDecode(Format16 format, uint16_t bits) {
  const int m = format.mantissa_bits;
  const int mantissa = bits & ((1 << m) - 1);
  const int exponent = (bits & 0x7fff) >> m;
  const double sign = (bits & 0x8000) ? -1.0 : 1.0;
  if (exponent == 2 * format.max_exponent + 1)
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - format.max_exponent - m);
  return sign * std::ldexp((1 << m) + mantissa, exponent - format.max_exponent - m);
}

// Of a number; NaN gives some NaN.
inline uint16_t ReferenceEncode(Format16 format, double value) {
  const int m = format.mantissa_bits;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const int infinity = (2 * format.max_exponent + 1) << m;
  if (std::isnan(value)) return static_cast<uint16_t>(infinity | 1 << (m - 1));
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | infinity);
  if (magnitude == 0.0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), 1 - format.max_exponent);
  // nearbyint rounds to nearest even; a carry into the next exponent adds up by itself.
  const double steps = std::nearbyint(std::ldexp(magnitude, m - exponent));
  const int64_t biased = exponent + format.max_exponent - 1;
  const int64_t bits = (biased << m) + static_cast<int64_t>(steps);
  return static_cast<uint16_t>(sign | std::min<int64_t>(bits, infinity));
}

}  // namespace bagua

#endif  // BAGUA_TESTS_CPP_HALF_REFERENCE_H_
