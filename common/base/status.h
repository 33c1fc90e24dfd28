// Failure as a value. A bug in this code is a BAGUA_CHECK; whatever a user, a peer or the kernel
// can cause is a Status, handed up to c_api.cc.
#ifndef BAGUA_COMMON_BASE_STATUS_H_
#define BAGUA_COMMON_BASE_STATUS_H_

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

namespace bagua {

// Values equal bagua_status_t of c_api.h.
enum class StatusCode : int {
  kOk = 0,
  kInProgress = 1,
  kNotInitialized = 2,
  kInvalidArgument = 3,
  kMismatch = 4,
  kPeerLost = 5,
  kTimeout = 6,
  kAborted = 7,
  kInternal = 8,
};

const char* StatusCodeName(StatusCode code);

// Code and text. Copying an OK status costs nothing; a failed one shares its text.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message)
      : failure_(std::make_shared<const Failure>(Failure{code, std::move(message)})) {}

  bool ok() const { return failure_ == nullptr; }
  StatusCode code() const { return failure_ ? failure_->code : StatusCode::kOk; }
  const std::string& message() const;
  // Same code, text prefixed with `context` and ": " unless it begins so. OK stays OK.
  Status WithContext(const std::string& context) const;

 private:
  struct Failure {
    StatusCode code;
    std::string message;
  };
  std::shared_ptr<const Failure> failure_;
};

// A value or the Status that explains its absence.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)
  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  T&& value() && { return std::move(*value_); }

 private:
  std::optional<T> value_;
  Status status_;
};

template <class... Parts>
std::string StrCat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// The shortest digits that give this value and no other.
std::string ExactText(double value);

// kInternal with errno's text: "connect to 10.0.0.1:80: Connection refused".
Status ErrnoStatus(const std::string& what, int error);

// In a handler: kInternal with the text of the exception that it handles.
Status CaughtStatus();

}  // namespace bagua

#define BAGUA_RETURN_IF_ERROR(expression)                                                        \
  do {                                                                                           \
    if (::bagua::Status bagua_status_ = (expression); !bagua_status_.ok()) return bagua_status_; \
  } while (false)

// The same inside a coroutine; `expression` may hold a co_await.
#define BAGUA_CO_RETURN_IF_ERROR(expression)          \
  do {                                                \
    ::bagua::Status bagua_status_ = (expression);     \
    if (!bagua_status_.ok()) co_return bagua_status_; \
  } while (false)

#endif  // BAGUA_COMMON_BASE_STATUS_H_
