#include <algorithm>
#include <cstring>

#include "common/collective/backend.h"

namespace bagua {

Pieces::Pieces(std::span<const Piece> pieces, size_t element_bytes)
    : pieces_(pieces), element_bytes_(element_bytes) {
  starts_.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    starts_.push_back(count_);
    count_ += piece.count;
  }
}

size_t Pieces::FindPiece(size_t element) const {
  // The last piece that starts at or before `element`.
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), element);
  return after == starts_.begin() ? 0 : static_cast<size_t>(after - starts_.begin()) - 1;
}

std::span<std::byte> Pieces::InPlace() const {
  if (pieces_.size() != 1 || pieces_[0].in != pieces_[0].out) return {};
  return {pieces_[0].out, bytes()};
}

void Pieces::Pack(size_t begin, size_t count, std::byte* dst) const {
  ForEach(begin, count, [&](const std::byte* in, std::byte*, size_t offset, size_t here) {
    std::memcpy(dst + offset * element_bytes_, in, here * element_bytes_);
  });
}

void Pieces::Unpack(size_t begin, size_t count, const std::byte* src) const {
  ForEach(begin, count, [&](const std::byte*, std::byte* out, size_t offset, size_t here) {
    std::memcpy(out, src + offset * element_bytes_, here * element_bytes_);
  });
}

}  // namespace bagua
