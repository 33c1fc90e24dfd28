#include "common/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace bagua {

CheckFailure::CheckFailure(const char* file, int line, const char* condition) {
  text_ << file << ":" << line << ": internal error, please report: " << condition << " ";
}

CheckFailure::~CheckFailure() {
  std::fprintf(stderr, "[bagua] %s\n", text_.str().c_str());
  std::abort();
}

}  // namespace bagua
