// BAGUA_CHECK(condition) << "both values": a bug in this code, never a fault of user, peer or
// kernel.
#ifndef BAGUA_COMMON_BASE_CHECK_H_
#define BAGUA_COMMON_BASE_CHECK_H_

#include <sstream>

namespace bagua {

// Collects the text and ends the process with it.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return text_; }

 private:
  std::ostringstream text_;
};

}  // namespace bagua

#define BAGUA_CHECK(condition)                             \
  if (__builtin_expect(static_cast<bool>(condition), 1)) { \
  } else /* NOLINT(readability/braces) */                  \
    ::bagua::CheckFailure(__FILE__, __LINE__, #condition).stream()

#endif  // BAGUA_COMMON_BASE_CHECK_H_
