// A ring of bytes with one writer and one reader, in memory that both see. Zeroed memory is an
// empty ring.
#ifndef BAGUA_COMMON_TRANSPORT_BYTE_RING_H_
#define BAGUA_COMMON_TRANSPORT_BYTE_RING_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace bagua {

// Positions only grow; a position modulo kCapacity is an index. Writer and reader may be different
// processes: the reader never trusts the distance of the positions beyond kCapacity.
struct ByteRing {
  static constexpr size_t kCapacity = size_t{128} << 10;

  alignas(64) std::atomic<uint64_t> written;
  std::atomic<uint32_t> closed;  // by the writer, after its last byte
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) std::byte bytes[kCapacity];

  // Writer only. How many bytes of `src` were taken.
  size_t Write(std::span<const std::byte> src) {
    const uint64_t at = written.load(std::memory_order_relaxed);
    const size_t used = std::min<uint64_t>(at - read.load(std::memory_order_acquire), kCapacity);
    const size_t count = std::min(src.size(), kCapacity - used);
    if (count == 0) return 0;
    const size_t index = at % kCapacity;
    const size_t first = std::min(count, kCapacity - index);
    std::memcpy(bytes + index, src.data(), first);
    std::memcpy(bytes, src.data() + first, count - first);
    written.store(at + count, std::memory_order_release);
    return count;
  }

  // Reader only. How many bytes were moved to `dst`.
  size_t Read(std::span<std::byte> dst) {
    const uint64_t at = read.load(std::memory_order_relaxed);
    const size_t available =
        std::min<uint64_t>(written.load(std::memory_order_acquire) - at, kCapacity);
    const size_t count = std::min(dst.size(), available);
    if (count == 0) return 0;
    const size_t index = at % kCapacity;
    const size_t first = std::min(count, kCapacity - index);
    std::memcpy(dst.data(), bytes + index, first);
    std::memcpy(dst.data() + first, bytes, count - first);
    read.store(at + count, std::memory_order_release);
    return count;
  }

  // Reader only. Every byte that will ever be written was read.
  bool Ended() const {
    return closed.load(std::memory_order_acquire) != 0 &&
           written.load(std::memory_order_acquire) == read.load(std::memory_order_relaxed);
  }
};

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_BYTE_RING_H_
