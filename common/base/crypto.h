// The little cryptography of the handshake: SHA-256 (FIPS 180-4), HMAC (RFC 2104), random bytes.
// Thread-safety: free functions, any thread.
#ifndef BAGUA_COMMON_BASE_CRYPTO_H_
#define BAGUA_COMMON_BASE_CRYPTO_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "common/base/status.h"

namespace bagua {

using Digest = std::array<std::byte, 32>;

// SHA-256 of everything given to Update; Finish once, at the end.
class Sha256 {
 public:
  void Update(std::span<const std::byte> message);
  Digest Finish();

 private:
  void Compress(const std::byte* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, 64> pending_{};
  uint64_t total_bytes_ = 0;
};

Digest HmacSha256(std::span<const std::byte> key, std::span<const std::byte> message);

// Fills `out` from the kernel's generator, which is seeded before the first byte is given.
Status FillRandom(std::span<std::byte> out);

// Takes the same time wherever the first difference is. Different lengths are unequal at once.
bool EqualInConstantTime(std::span<const std::byte> a, std::span<const std::byte> b);

// Lower-case hexadecimal digits.
std::string ToHex(std::span<const std::byte> bytes);

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_CRYPTO_H_
