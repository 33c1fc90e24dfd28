#include "common/transport/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace bagua {
namespace {

constexpr size_t kPage = 4096;

Result<std::byte*> MapShared(int fd, size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return ErrnoStatus(StrCat("mapping ", bytes, " shared bytes"), errno);
  return static_cast<std::byte*>(data);
}

}  // namespace

Segment::Segment(UniqueFd fd, std::byte* data, size_t bytes)
    : fd_(std::move(fd)), data_(data), bytes_(bytes) {}

Segment::~Segment() {
  ::munmap(data_, bytes_);
}

Result<std::shared_ptr<Segment>> Segment::Create(size_t bytes) {
  bytes = std::max((bytes + kPage - 1) / kPage * kPage, kPage);
  UniqueFd fd(::memfd_create("bagua", MFD_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus("creating a shared memory file", errno);
  if (const int error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes)); error != 0)
    return ErrnoStatus(StrCat("taking ", bytes, " bytes of shared memory"), error);
  Result<std::byte*> data = MapShared(fd.get(), bytes);
  if (!data.ok()) return data.status();
  return std::shared_ptr<Segment>(new Segment(std::move(fd), data.value(), bytes));
}

Result<std::shared_ptr<Segment>> Segment::Map(UniqueFd fd, size_t bytes) {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus("looking at a peer's segment", errno);
  bytes = std::max((bytes + kPage - 1) / kPage * kPage, kPage);
  if (static_cast<size_t>(info.st_size) < bytes)
    return Status(StatusCode::kInternal,
                  StrCat("a peer's segment holds ", info.st_size, " bytes instead of ", bytes));
  bytes = static_cast<size_t>(info.st_size);
  Result<std::byte*> data = MapShared(fd.get(), bytes);
  if (!data.ok()) return data.status();
  return std::shared_ptr<Segment>(new Segment(std::move(fd), data.value(), bytes));
}

Status Segment::MakePrivate() {
  void* copy = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return ErrnoStatus("taking memory for a private copy", errno);
  // From the file: threads of this rank may be writing to the mapping.
  for (size_t done = 0; done < bytes_;) {
    const ssize_t got = ::pread(fd_.get(), static_cast<std::byte*>(copy) + done, bytes_ - done,
                                static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      const Status failed = ErrnoStatus("copying a shared segment", got < 0 ? errno : EIO);
      ::munmap(copy, bytes_);
      return failed;
    }
    done += static_cast<size_t>(got);
  }
  if (::mremap(copy, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, data_) == MAP_FAILED)
    return ErrnoStatus("replacing a shared segment", errno);
  return {};
}

}  // namespace bagua
