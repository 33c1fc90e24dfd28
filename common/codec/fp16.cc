#include "common/codec/cast_codec.h"
#include "common/codec/codecs.h"

namespace bagua {
namespace {

class Fp16 final : public CastCodec<Half, DType::kFloat16> {
 public:
  const char* name() const override { return "fp16"; }
};

}  // namespace

const Codec* Fp16Codec() {
  static const Fp16 codec;
  return &codec;
}

}  // namespace bagua
