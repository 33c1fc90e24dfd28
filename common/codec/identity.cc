#include <cstring>

#include "common/base/check.h"
#include "common/codec/codecs.h"

namespace bagua {
namespace {

class Identity final : public Codec {
 public:
  const char* name() const override { return "none"; }
  bool sums_encoded() const override { return true; }
  DType encoded_dtype(DType dtype) const override { return dtype; }
  size_t EncodedBytes(DType dtype, size_t count) const override { return count * SizeOf(dtype); }

  void Encode(DType dtype, const void* values, size_t count,
              std::span<std::byte> encoded) const override {
    const size_t bytes = EncodedBytes(dtype, count);
    BAGUA_CHECK(encoded.size() >= bytes) << encoded.size() << " vs " << bytes;
    if (bytes > 0) std::memcpy(encoded.data(), values, bytes);
  }

  void Decode(DType dtype, std::span<const std::byte> encoded, size_t count,
              void* values) const override {
    const size_t bytes = EncodedBytes(dtype, count);
    BAGUA_CHECK(encoded.size() >= bytes) << encoded.size() << " vs " << bytes;
    if (bytes > 0) std::memcpy(values, encoded.data(), bytes);
  }
};

}  // namespace

const Codec* IdentityCodec() {
  static const Identity codec;
  return &codec;
}

}  // namespace bagua
