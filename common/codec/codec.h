// A codec turns values of one type into fewer bytes and back.
#ifndef BAGUA_COMMON_CODEC_CODEC_H_
#define BAGUA_COMMON_CODEC_CODEC_H_

#include <cstddef>
#include <span>
#include <string>

#include "common/base/status.h"
#include "common/base/types.h"

namespace bagua {

// Stateless: one instance serves all. Thread-safety: any thread.
class Codec {
 public:
  virtual ~Codec() = default;
  virtual const char* name() const = 0;
  // Whether encoded values can be reduced without decoding, as `encoded_dtype`.
  virtual bool sums_encoded() const = 0;
  // Type of the encoded elements for input of type `dtype`; meaningful if sums_encoded(). Equals
  // `dtype` where the codec does nothing (integers; float16 for "fp16" and so on).
  virtual DType encoded_dtype(DType dtype) const = 0;
  // Octets that `count` values of `dtype` take when encoded.
  virtual size_t EncodedBytes(DType dtype, size_t count) const = 0;
  // `encoded` holds EncodedBytes. Round to nearest even; float16 overflow becomes infinity, NaN
  // stays.
  virtual void Encode(DType dtype, const void* values, size_t count,
                      std::span<std::byte> encoded) const = 0;
  virtual void Decode(DType dtype, std::span<const std::byte> encoded, size_t count,
                      void* values) const = 0;
};

// kInvalidArgument naming the known codecs.
Result<const Codec*> FindCodec(const std::string& name);

}  // namespace bagua

#endif  // BAGUA_COMMON_CODEC_CODEC_H_
