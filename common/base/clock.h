// Time. A Deadline is a point on the steady clock; kForever never comes.
#ifndef BAGUA_COMMON_BASE_CLOCK_H_
#define BAGUA_COMMON_BASE_CLOCK_H_

#include <chrono>

namespace bagua {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;
using Seconds = std::chrono::duration<double>;

inline constexpr Deadline kForever = Deadline::max();

// Zero or negative means without limit where a knob says so; here negative alone does.
inline Deadline After(Seconds delay) {
  if (delay.count() < 0 || delay.count() > 1e9) return kForever;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(delay);
}

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_CLOCK_H_
