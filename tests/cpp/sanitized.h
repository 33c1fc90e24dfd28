// Whether a sanitizer watches: such a build is many times slower and runs fewer combinations.
#ifndef BAGUA_TESTS_CPP_SANITIZED_H_
#define BAGUA_TESTS_CPP_SANITIZED_H_

namespace bagua {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace bagua

#endif  // BAGUA_TESTS_CPP_SANITIZED_H_
