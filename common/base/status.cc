#include "common/base/status.h"

#include <array>
#include <charconv>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

namespace bagua {

const char* StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "OK";
    case StatusCode::kInProgress:
      return "IN_PROGRESS";
    case StatusCode::kNotInitialized:
      return "NOT_INITIALIZED";
    case StatusCode::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case StatusCode::kMismatch:
      return "MISMATCH";
    case StatusCode::kPeerLost:
      return "PEER_LOST";
    case StatusCode::kTimeout:
      return "TIMEOUT";
    case StatusCode::kAborted:
      return "ABORTED";
    case StatusCode::kInternal:
      return "INTERNAL";
  }
  return "UNKNOWN";
}

const std::string& Status::message() const {
  static const std::string empty;
  return failure_ ? failure_->message : empty;
}

Status Status::WithContext(const std::string& context) const {
  if (ok() || message().starts_with(context)) return *this;
  return Status(code(), context + ": " + message());
}

Status ErrnoStatus(const std::string& what, int error) {
  return Status(StatusCode::kInternal, what + ": " + std::strerror(error));
}

std::string ExactText(double value) {
  std::array<char, 32> text;
  const auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} ? std::string(text.data(), end) : StrCat(value);
}

Status CaughtStatus() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kInternal, "out of memory");
  } catch (const std::length_error&) {
    return Status(StatusCode::kInternal, "out of memory");
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, error.what());
  } catch (...) {
    return Status(StatusCode::kInternal, "an exception of unknown type");
  }
}

}  // namespace bagua
