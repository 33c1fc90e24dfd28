// The rows of the registry, one codec a file.
#ifndef BAGUA_COMMON_CODEC_CODECS_H_
#define BAGUA_COMMON_CODEC_CODECS_H_

#include "common/codec/codec.h"

namespace bagua {

// Each returns an instance that lives until the process ends.
const Codec* IdentityCodec();
const Codec* Fp16Codec();
const Codec* Bf16Codec();

}  // namespace bagua

#endif  // BAGUA_COMMON_CODEC_CODECS_H_
