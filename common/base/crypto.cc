#include "common/base/crypto.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>

namespace bagua {
namespace {

constexpr size_t kBlock = 64;

// First 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t LoadBigEndian(const std::byte* bytes) {
  return static_cast<uint32_t>(bytes[0]) << 24 | static_cast<uint32_t>(bytes[1]) << 16 |
         static_cast<uint32_t>(bytes[2]) << 8 | static_cast<uint32_t>(bytes[3]);
}

void StoreBigEndian(uint32_t value, std::byte* out) {
  for (int i = 0; i < 4; ++i) out[i] = static_cast<std::byte>(value >> (24 - 8 * i));
}

std::array<uint32_t, 64> Schedule(const std::byte* block) {
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i) w[i] = LoadBigEndian(block + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  return w;
}

}  // namespace

void Sha256::Compress(const std::byte* block) {
  const std::array<uint32_t, 64> w = Schedule(block);
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<uint32_t, 8> added = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += added[i];
}

void Sha256::Update(std::span<const std::byte> message) {
  while (!message.empty()) {
    const size_t held = total_bytes_ % kBlock;
    const size_t taken = std::min(message.size(), kBlock - held);
    std::copy_n(message.begin(), taken, pending_.begin() + static_cast<std::ptrdiff_t>(held));
    total_bytes_ += taken;
    message = message.subspan(taken);
    if (total_bytes_ % kBlock == 0) Compress(pending_.data());
  }
}

Digest Sha256::Finish() {
  const uint64_t bits = total_bytes_ * 8;
  const std::array<std::byte, kBlock> padding = {std::byte{0x80}};
  const size_t held = total_bytes_ % kBlock;
  Update(std::span(padding).first(held < 56 ? 56 - held : 120 - held));
  std::array<std::byte, 8> length;
  StoreBigEndian(static_cast<uint32_t>(bits >> 32), length.data());
  StoreBigEndian(static_cast<uint32_t>(bits), length.data() + 4);
  Update(length);
  Digest digest;
  for (size_t i = 0; i < 8; ++i) StoreBigEndian(state_[i], digest.data() + 4 * i);
  return digest;
}

Digest HmacSha256(std::span<const std::byte> key, std::span<const std::byte> message) {
  std::array<std::byte, kBlock> padded{};
  if (key.size() > kBlock) {
    Sha256 hash;
    hash.Update(key);
    std::ranges::copy(hash.Finish(), padded.begin());
  } else {
    std::ranges::copy(key, padded.begin());
  }
  std::array<std::byte, kBlock> inner_key;
  std::array<std::byte, kBlock> outer_key;
  for (size_t i = 0; i < kBlock; ++i) {
    inner_key[i] = padded[i] ^ std::byte{0x36};
    outer_key[i] = padded[i] ^ std::byte{0x5c};
  }
  Sha256 inner;
  inner.Update(inner_key);
  inner.Update(message);
  Sha256 outer;
  outer.Update(outer_key);
  outer.Update(inner.Finish());
  return outer.Finish();
}

Status FillRandom(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus("taking random bytes", errno);
    out = out.subspan(static_cast<size_t>(got));
  }
  return {};
}

bool EqualInConstantTime(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char difference = 0;  // volatile: no early end by the compiler
  for (size_t i = 0; i < a.size(); ++i)
    difference = difference | std::to_integer<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

std::string ToHex(std::span<const std::byte> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    text += kDigits[std::to_integer<unsigned>(byte >> 4)];
    text += kDigits[std::to_integer<unsigned>(byte & std::byte{15})];
  }
  return text;
}

}  // namespace bagua
