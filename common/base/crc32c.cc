#include "common/base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace bagua {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected

using Table = std::array<uint32_t, 256>;

// Row k: the effect of a byte that is followed by k zero bytes.
constexpr std::array<Table, 8> MakeTables() {
  std::array<Table, 8> rows{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    rows[0][i] = crc;
  }
  for (size_t row = 1; row < 8; ++row)
    for (uint32_t i = 0; i < 256; ++i)
      rows[row][i] = (rows[row - 1][i] >> 8) ^ rows[0][rows[row - 1][i] & 0xff];
  return rows;
}

constexpr std::array<Table, 8> kTables = MakeTables();

uint64_t Load(const std::byte* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

#if defined(__x86_64__)

#define BAGUA_SSE42 __attribute__((target("sse4.2")))

// Advances a register over `kLane` zero bytes: linear, so four lookups of one byte each.
template <size_t kLane>
class ZeroShift {
 public:
  BAGUA_SSE42 ZeroShift() {
    for (int bit = 0; bit < 32; ++bit) {
      uint64_t crc = uint64_t{1} << bit;
      for (size_t i = 0; i < kLane / 8; ++i) crc = _mm_crc32_u64(crc, 0);
      Spread(bit, static_cast<uint32_t>(crc));
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return rows_[0][crc & 0xff] ^ rows_[1][crc >> 8 & 0xff] ^ rows_[2][crc >> 16 & 0xff] ^
           rows_[3][crc >> 24];
  }

 private:
  void Spread(int bit, uint32_t image) {
    for (uint32_t value = 0; value < 256; ++value)
      if ((value >> (bit % 8) & 1) != 0) rows_[static_cast<size_t>(bit / 8)][value] ^= image;
  }
  std::array<Table, 4> rows_{};
};

// The instruction takes three cycles but starts one each cycle: three lanes keep it busy.
template <size_t kLane>
BAGUA_SSE42 uint64_t TakeTriples(const std::byte** at, size_t* left, uint64_t crc) {
  static const ZeroShift<kLane> shift;
  const std::byte* p = *at;
  for (; *left >= 3 * kLane; *left -= 3 * kLane, p += 3 * kLane) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < kLane; i += 8) {
      crc = _mm_crc32_u64(crc, Load(p + i));
      second = _mm_crc32_u64(second, Load(p + kLane + i));
      third = _mm_crc32_u64(third, Load(p + 2 * kLane + i));
    }
    crc = shift(static_cast<uint32_t>(crc)) ^ second;
    crc = shift(static_cast<uint32_t>(crc)) ^ third;
  }
  *at = p;
  return crc;
}

BAGUA_SSE42 uint32_t ByInstruction(std::span<const std::byte> bytes, uint32_t before) {
  uint64_t crc = ~before;
  const std::byte* at = bytes.data();
  size_t left = bytes.size();
  crc = TakeTriples<2048>(&at, &left, crc);
  crc = TakeTriples<128>(&at, &left, crc);
  for (; left >= 8; left -= 8, at += 8) crc = _mm_crc32_u64(crc, Load(at));
  auto narrow = static_cast<uint32_t>(crc);
  for (; left > 0; --left, ++at) narrow = _mm_crc32_u8(narrow, std::to_integer<uint8_t>(*at));
  return ~narrow;
}

bool HasInstruction() {
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
  return has;
}

#else

bool HasInstruction() {
  return false;
}
uint32_t ByInstruction(std::span<const std::byte> bytes, uint32_t before) {
  return Crc32cByTable(bytes, before);
}

#endif

}  // namespace

uint32_t Crc32cByTable(std::span<const std::byte> bytes, uint32_t before) {
  uint32_t crc = ~before;
  while (bytes.size() >= 8) {
    const uint64_t word = Load(bytes.data()) ^ crc;
    crc = 0;
    for (size_t i = 0; i < 8; ++i) crc ^= kTables[7 - i][word >> (8 * i) & 0xff];
    bytes = bytes.subspan(8);
  }
  for (const std::byte byte : bytes)
    crc = (crc >> 8) ^ kTables[0][(crc ^ std::to_integer<uint32_t>(byte)) & 0xff];
  return ~crc;
}

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t before) {
  return HasInstruction() ? ByInstruction(bytes, before) : Crc32cByTable(bytes, before);
}

}  // namespace bagua
