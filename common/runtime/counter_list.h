// An engine's counters by name.
#ifndef BAGUA_COMMON_RUNTIME_COUNTER_LIST_H_
#define BAGUA_COMMON_RUNTIME_COUNTER_LIST_H_

#include <cstdint>
#include <vector>

#include "common/runtime/engine.h"

namespace bagua {

struct NamedCounter {
  const char* name;
  int64_t value;
};

// Thread-safety: any thread.
std::vector<NamedCounter> ReadCounters(const Engine& engine);

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_COUNTER_LIST_H_
