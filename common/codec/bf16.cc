#include "common/codec/cast_codec.h"
#include "common/codec/codecs.h"

namespace bagua {
namespace {

class Bf16 final : public CastCodec<Bfloat16, DType::kBfloat16> {
 public:
  const char* name() const override { return "bf16"; }
};

}  // namespace

const Codec* Bf16Codec() {
  static const Bf16 codec;
  return &codec;
}

}  // namespace bagua
