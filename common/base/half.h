// Scalar conversions of the two 16-bit floating types, round to nearest even as IEEE 754 says.
#ifndef BAGUA_COMMON_BASE_HALF_H_
#define BAGUA_COMMON_BASE_HALF_H_

#include <bit>
#include <cstdint>

namespace bagua {

// Storage of a float16 (binary16) and a bfloat16 value; arithmetic happens in float.
struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

inline float ToFloat(Bfloat16 v) {
  return std::bit_cast<float>(static_cast<uint32_t>(v.bits) << 16);
}

inline float ToFloat(Half v) {
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000u) << 16;
  const uint32_t magnitude = v.bits & 0x7fffu;
  // Shifts exponent and mantissa into place; 2^112 mends the exponent bias, subnormals included.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t finite = std::bit_cast<uint32_t>(scaled);
  const uint32_t special = 0x7f800000u | (magnitude << 13);
  return std::bit_cast<float>(sign | (magnitude >= 0x7c00u ? special : finite));
}

inline Bfloat16 ToBfloat16(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline Half ToHalf(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)  // NaN stays NaN, its upper payload kept
    return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 aligns the value so that the hardware rounds at the right bit.
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x3f000000u))};
  }
  magnitude += 0xc8000fffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | (magnitude >> 13))};
}

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_HALF_H_
