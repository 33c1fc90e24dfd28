// Codecs that store each floating value in a narrower floating type.
#ifndef BAGUA_COMMON_CODEC_CAST_CODEC_H_
#define BAGUA_COMMON_CODEC_CAST_CODEC_H_

#include <cstddef>
#include <cstring>
#include <span>

#include "common/base/check.h"
#include "common/base/half_cast.h"
#include "common/codec/codec.h"

namespace bagua {

// float32 and float64 become `Narrow`, which is `kNarrow`; all other types pass unchanged.
template <class Narrow, DType kNarrow>
class CastCodec : public Codec {
 public:
  bool sums_encoded() const override { return true; }

  DType encoded_dtype(DType dtype) const override { return IsWide(dtype) ? kNarrow : dtype; }

  size_t EncodedBytes(DType dtype, size_t count) const override {
    return count * SizeOf(encoded_dtype(dtype));
  }

  void Encode(DType dtype, const void* values, size_t count,
              std::span<std::byte> encoded) const override {
    CheckSize(dtype, count, encoded.size());
    auto* narrow = reinterpret_cast<Narrow*>(encoded.data());
    if (dtype == DType::kFloat32)
      Convert(static_cast<const float*>(values), count, narrow);
    else if (dtype == DType::kFloat64)
      Convert(static_cast<const double*>(values), count, narrow);
    else if (count > 0)
      std::memcpy(encoded.data(), values, EncodedBytes(dtype, count));
  }

  void Decode(DType dtype, std::span<const std::byte> encoded, size_t count,
              void* values) const override {
    CheckSize(dtype, count, encoded.size());
    const auto* narrow = reinterpret_cast<const Narrow*>(encoded.data());
    if (dtype == DType::kFloat32)
      Convert(narrow, count, static_cast<float*>(values));
    else if (dtype == DType::kFloat64)
      Convert(narrow, count, static_cast<double*>(values));
    else if (count > 0)
      std::memcpy(values, encoded.data(), EncodedBytes(dtype, count));
  }

 private:
  static bool IsWide(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kFloat64; }
  void CheckSize(DType dtype, size_t count, size_t bytes) const {
    BAGUA_CHECK(bytes >= EncodedBytes(dtype, count))
        << name() << ": " << bytes << " octets for " << count << " values of "
        << bagua::Name(dtype);
  }
};

}  // namespace bagua

#endif  // BAGUA_COMMON_CODEC_CAST_CODEC_H_
