// Chunk arithmetic, pure.
#ifndef BAGUA_COMMON_COLLECTIVE_CHUNK_H_
#define BAGUA_COMMON_COLLECTIVE_CHUNK_H_

#include <algorithm>
#include <cstddef>

namespace bagua {

struct Chunk {
  size_t begin = 0;
  size_t count = 0;
  size_t end() const { return begin + count; }
};

// Chunk `index` of `count` elements cut for `size` ranks: all hold ceil(count / size) elements but
// the last ones, which hold what is left, perhaps nothing.
constexpr Chunk ChunkOf(size_t count, int size, int index) {
  const size_t each = (count + static_cast<size_t>(size) - 1) / static_cast<size_t>(size);
  const size_t begin = std::min(count, each * static_cast<size_t>(index));
  return {begin, std::min(each, count - begin)};
}

// The same, cut so that the first ranks hold one element more (reducescatter's rows).
constexpr Chunk EvenChunkOf(size_t count, int size, int index) {
  const size_t n = static_cast<size_t>(size);
  const size_t i = static_cast<size_t>(index);
  const size_t least = count / n;
  const size_t longer = count % n;
  return {i * least + std::min(i, longer), least + (i < longer ? 1 : 0)};
}

// Piece `index` of a range cut into pieces of at most `most` elements.
constexpr Chunk BlockOf(Chunk range, size_t most, size_t index) {
  const size_t begin = std::min(range.count, most * index);
  return {range.begin + begin, std::min(most, range.count - begin)};
}

constexpr size_t BlockCount(size_t count, size_t most) {
  return (count + most - 1) / most;
}

// Remainder that is never negative.
constexpr int Mod(int value, int size) {
  return ((value % size) + size) % size;
}

}  // namespace bagua

#endif  // BAGUA_COMMON_COLLECTIVE_CHUNK_H_
