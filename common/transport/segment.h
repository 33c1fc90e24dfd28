// Memory that the ranks of a host share: an anonymous memory file, mapped by each of them. Nothing
// stays behind when they die.
#ifndef BAGUA_COMMON_TRANSPORT_SEGMENT_H_
#define BAGUA_COMMON_TRANSPORT_SEGMENT_H_

#include <cstddef>
#include <memory>

#include "common/base/fd.h"
#include "common/base/status.h"

namespace bagua {

// Thread-safety: the mapping itself is plain memory; MakePrivate by one thread at a time.
class Segment {
 public:
  // Zeroed, page-aligned memory of at least `bytes`, taken at once: kInternal if the machine has
  // not enough, rather than a fault at the first write.
  static Result<std::shared_ptr<Segment>> Create(size_t bytes);
  // Maps a peer's segment whole. kInternal if the file is smaller than `bytes`.
  static Result<std::shared_ptr<Segment>> Map(UniqueFd fd, size_t bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // The memory file, to hand to peers.
  int fd() const { return fd_.get(); }
  // Puts a private copy in place of the shared pages, at the same address: pointers stay valid, and
  // no peer sees or makes changes any more.
  Status MakePrivate();

 private:
  Segment(UniqueFd fd, std::byte* data, size_t bytes);
  UniqueFd fd_;
  std::byte* data_;
  size_t bytes_;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_SEGMENT_H_
