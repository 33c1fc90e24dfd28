#include <string>

#include "common/codec/codecs.h"

namespace bagua {
namespace {

struct CodecEntry {
  const char* name;
  const Codec* (*codec)();
};

constexpr CodecEntry kCodecs[] = {
    {"none", IdentityCodec},
    {"fp16", Fp16Codec},
    {"bf16", Bf16Codec},
};

}  // namespace

Result<const Codec*> FindCodec(const std::string& name) {
  std::string known;
  for (const CodecEntry& entry : kCodecs) {
    if (name == entry.name) return entry.codec();
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  return Status(StatusCode::kInvalidArgument,
                StrCat("compression '", name, "' is unknown. Known: ", known, "."));
}

}  // namespace bagua
