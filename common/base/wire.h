// Encoding of control messages: little-endian fixed-width integers, length-prefixed strings.
// The Reader treats its input as hostile: no read past the end, no length trusted before it is
// compared with what is left. A failed read makes all later ones fail and return zeros.
#ifndef BAGUA_COMMON_BASE_WIRE_H_
#define BAGUA_COMMON_BASE_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "common/base/status.h"

namespace bagua {

using Bytes = std::vector<std::byte>;

class Writer {
 public:
  template <class T>
  requires std::is_trivially_copyable_v<T>
  void Put(T value) {
    const auto* raw = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), raw, raw + sizeof(T));
  }
  void PutString(std::string_view text) {
    Put(static_cast<uint32_t>(text.size()));
    PutRaw(std::as_bytes(std::span(text.data(), text.size())));
  }
  template <class T>
  void PutList(const std::vector<T>& values) {
    Put(static_cast<uint32_t>(values.size()));
    PutRaw(std::as_bytes(std::span(values)));
  }
  void PutRaw(std::span<const std::byte> raw) {
    bytes_.insert(bytes_.end(), raw.begin(), raw.end());
  }
  Bytes Take() { return std::move(bytes_); }
  size_t size() const { return bytes_.size(); }

 private:
  Bytes bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}

  template <class T>
  requires std::is_trivially_copyable_v<T> T Get() {
    T value{};
    if (Claim(sizeof(T))) {
      std::memcpy(&value, left_.data(), sizeof(T));
      left_ = left_.subspan(sizeof(T));
    }
    return value;
  }
  std::string GetString() {
    const auto length = Get<uint32_t>();
    if (!Claim(length)) return {};
    std::string text(reinterpret_cast<const char*>(left_.data()), length);
    left_ = left_.subspan(length);
    return text;
  }
  template <class T>
  std::vector<T> GetList() {
    const auto count = Get<uint32_t>();
    if (!Claim(static_cast<uint64_t>(count) * sizeof(T))) return {};
    std::vector<T> values(count);
    if (count > 0) std::memcpy(values.data(), left_.data(), count * sizeof(T));
    left_ = left_.subspan(count * sizeof(T));
    return values;
  }
  // Count of records that follow, each of at least `least_bytes`; 0 when that cannot be.
  uint32_t GetCount(size_t least_bytes) {
    const auto count = Get<uint32_t>();
    if (count > left_.size() / least_bytes) failed_ = true;
    return failed_ ? 0 : count;
  }
  bool ok() const { return !failed_; }
  bool AtEnd() const { return left_.empty(); }
  // OK if every read fitted and nothing is left over.
  Status Finish(const char* what) const {
    if (failed_ || !left_.empty())
      return Status(StatusCode::kInternal, StrCat("malformed message: ", what));
    return {};
  }

 private:
  bool Claim(uint64_t bytes) {
    if (failed_ || bytes > left_.size()) failed_ = true;
    return !failed_;
  }
  std::span<const std::byte> left_;
  bool failed_ = false;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_WIRE_H_
