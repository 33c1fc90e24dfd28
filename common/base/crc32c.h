// CRC32C (Castagnoli, RFC 3720), as on TCP payloads. The SSE4.2 instruction where the processor has
// it, tables where not; the way is chosen at run time, the value is the same.
#ifndef BAGUA_COMMON_BASE_CRC32C_H_
#define BAGUA_COMMON_BASE_CRC32C_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace bagua {

// `before` is the value of the bytes that precede `bytes`; 0 at the start.
// Crc32c(b, Crc32c(a)) is the value of a followed by b.
uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t before = 0);

// The fallback by itself, for tests.
uint32_t Crc32cByTable(std::span<const std::byte> bytes, uint32_t before = 0);

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_CRC32C_H_
